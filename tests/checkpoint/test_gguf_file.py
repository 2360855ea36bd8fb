"""The GGUF container: what the `gguf` package writes is read back; damage of any kind is one sentence."""

import os
import random
import struct
import time

import gguf
import numpy as np
import pytest

from model.gguf_file import TENSOR_TYPES, CheckpointError, read_gguf_file
from tests.checkpoint import tiny_gguf


@pytest.fixture
def small(tmp_path):
    """A file of about two kilobytes with a value of every type."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 1)
    writer.add_int8("a.i8", -1)
    writer.add_uint16("a.u16", 2)
    writer.add_int16("a.i16", -2)
    writer.add_uint32("a.u32", 3)
    writer.add_int32("a.i32", -3)
    writer.add_uint64("a.u64", 4)
    writer.add_int64("a.i64", -4)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.25)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "안녕 😀")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.strings", ["one", "", "드물게"])
    writer.add_array("a.nested", [[1, 2], [3]])
    matrix = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    tiny_gguf.add(writer, "plain", matrix[:, :5].copy())
    tiny_gguf.add(writer, "quantised", matrix, "Q4_0")
    tiny_gguf.add(writer, "half", matrix[:2, :7].copy(), "F16")
    tiny_gguf.finish(writer)
    return path


def one_sentence(error):
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert text.endswith(".")
    return text


def test_reads_what_the_gguf_package_writes(small):
    file = read_gguf_file(small)
    expected = {
        "general.architecture": "llama",
        "a.u8": 1,
        "a.i8": -1,
        "a.u16": 2,
        "a.i16": -2,
        "a.u32": 3,
        "a.i32": -3,
        "a.u64": 4,
        "a.i64": -4,
        "a.f32": 0.5,
        "a.f64": 0.25,
        "a.bool": True,
        "a.string": "안녕 😀",
        "a.ints": [1, 2, 3],
        "a.strings": ["one", "", "드물게"],
        "a.nested": [[1, 2], [3]],
    }
    assert dict(file.metadata) == expected
    reference = gguf.GGUFReader(small)
    assert [(e.name, e.kind, list(e.shape), e.start, e.num_bytes) for e in file.tensors] == [
        (t.name, t.tensor_type.name, t.shape.tolist()[::-1], t.data_offset, t.n_bytes) for t in reference.tensors
    ]


def test_type_sizes_are_the_gguf_packages_own():
    for number, (name, block, num_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, num_bytes)


def test_every_truncation_point_is_one_sentence(small):
    whole = small.stat().st_size
    needed = max(entry.start + entry.num_bytes for entry in read_gguf_file(small).tensors)
    for size in range(whole, -1, -1):
        os.truncate(small, size)
        if size >= needed:  # only the padding after the last tensor is gone
            read_gguf_file(small)
            continue
        with pytest.raises(CheckpointError) as caught:
            read_gguf_file(small)
        assert str(small) in one_sentence(caught.value)


def test_flipped_bytes_are_read_or_refused_and_nothing_else(small):
    original = bytearray(small.read_bytes())
    table_end = min(entry.start for entry in read_gguf_file(small).tensors)
    rng = random.Random(11)
    refused = 0
    for _ in range(4000):
        damaged = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(table_end)] = rng.randrange(256)
        small.write_bytes(damaged)
        try:
            read_gguf_file(small)
        except CheckpointError as error:
            one_sentence(error)
            refused += 1
    assert refused > 1000


def header(tensors=0, keys=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys)


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(name, shape, kind=0, start=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, start)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (header(magic=b"ggml"), "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "version 50331648"),
        (header(tensors=1 << 60), "ends inside its header"),
        (header(keys=(1 << 64) - 1), "ends inside its header"),
        (header(keys=1) + text("k") + struct.pack("<I", 13) + bytes(64), "unknown type 13"),
        (header(keys=1) + text("k") + struct.pack("<IQ", 8, 1 << 62) + bytes(64), "ends inside its metadata key 'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(64), "ends inside"),
        (
            header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 6) + struct.pack("<Q", (1 << 64) - 1) * 8,
            "ends inside",
        ),
        (header(keys=1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(64), "too deeply"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 77, 1) + bytes(64), "elements of the unknown type 77"),
        (header(keys=1) + text("k") + struct.pack("<I", 8) + text(b"\xff\xfe") + bytes(64), "not UTF-8"),
        (header(keys=1) + text(b"\xff") + struct.pack("<I", 8) + bytes(64), "not UTF-8"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 1) + text(b"\xff\xfe") + bytes(64), "not UTF-8"),
        (header(keys=2) + (text("k") + struct.pack("<IB", 0, 1)) * 2 + bytes(64), "twice"),
        (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 3) + bytes(64), "not a power of two"),
        (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0) + bytes(64), "not a power of two"),
        (header(tensors=1) + entry("t", (4,), start=1 << 40) + bytes(64), "'t' ends at byte"),
        (header(tensors=1) + entry("t", (1 << 62, 1 << 62)) + bytes(64), "'t' ends at byte"),
        (header(tensors=1) + entry("t", (4, 4, 4, 4, 4)) + bytes(64), "5 dimensions"),
        (header(tensors=1) + entry("t", (4,), kind=99) + bytes(64), "type number 99"),
        (header(tensors=1) + entry("t", (3, 33), kind=2) + bytes(256), "rows of 33"),
        (header(tensors=1) + entry("t", (4,), start=5) + bytes(128), "multiple of 32"),
        (header(tensors=2) + entry("t", (16,)) + entry("u", (16,), start=32) + bytes(512), "overlap"),
        (header(tensors=2) + entry("t", (8,)) + entry("t", (8,), start=32) + bytes(512), "twice"),
    ],
)
def test_absurd_files_are_one_sentence_and_cost_nothing(tmp_path, content, words):
    path = tmp_path / "absurd.gguf"
    path.write_bytes(content)
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_gguf_file(path)
    assert words in one_sentence(caught.value)
    assert str(path) in str(caught.value)
    assert time.process_time() - started < 1.0


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError) as caught:
            read_gguf_file(path)
        assert str(path) in one_sentence(caught.value)


def test_a_vocabulary_of_fifty_thousand_is_read_fast(tmp_path):
    path = tmp_path / "many.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{number}" for number in range(50_000)])
    writer.add_token_merges([f"a{number} b{number}" for number in range(50_000)])
    tiny_gguf.finish(writer)
    best = min(_seconds(lambda: read_gguf_file(path)) for _ in range(3))
    assert best < 0.3


def _seconds(call):
    started = time.process_time()
    call()
    return time.process_time() - started
