"""Building and loading: cached by content, atomic, and no error where there is no compiler."""

import ctypes
import logging
import subprocess
import sys

import pytest
import torch

from model.decoder.kernels.cpu import build, library, structs
from model.decoder.kernels.select import choose


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    """An empty checkout: neither a cached object nor a compiler."""
    monkeypatch.setattr(build, "CHECKOUT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_the_mirrors_in_python_have_the_sizes_of_the_structs():
    loaded = library.load_library()
    if loaded is None:
        pytest.skip("no CPU kernels on this machine")
    sizes = (ctypes.c_int64 * 6)()
    loaded.es_struct_sizes(sizes)
    mirrors = (structs.Slice, structs.Part, structs.Op, structs.RotationSpec, structs.Batch, structs.Step)
    assert list(sizes) == [ctypes.sizeof(mirror) for mirror in mirrors]


def test_a_second_build_is_a_look_at_the_cache():
    try:
        first = build.build()
    except build.Unavailable as why:
        pytest.skip(str(why))
    stamp = first.stat().st_mtime_ns
    assert build.build() == first
    assert first.stat().st_mtime_ns == stamp


def test_without_a_compiler_the_reference_serves_and_one_line_says_so(nothing_built, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose("cpu", "auto", "auto").name.startswith("torch")
        assert choose("cpu", "auto", "auto").name.startswith("torch")
    assert [record.message for record in caplog.records if "no CPU kernels" in record.message] == [
        "no CPU kernels: no C++ compiler was found (install g++ to get the fast kernels); "
        "the torch reference serves instead"
    ]
    with pytest.raises(ValueError, match="not built"):
        choose("cpu", "auto", "cpu")
    torch.set_num_threads(1)


def test_a_processor_without_avx2_is_said(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t: fpu sse2 avx\n")
    assert build.missing_features(cpuinfo) == {"avx2", "fma", "f16c"}
    monkeypatch.setattr(build, "missing_features", lambda: frozenset({"avx2"}))
    with pytest.raises(build.Unavailable, match="lacks avx2"):
        build.build()


def test_a_source_that_does_not_compile_is_said(tmp_path, monkeypatch):
    (tmp_path / "broken.cpp").write_text("this is no C++")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "CHECKOUT", tmp_path)
    try:
        build.find_compiler()
    except build.Unavailable as why:
        pytest.skip(str(why))
    with pytest.raises(build.Unavailable, match="did not compile"):
        build.build()
    assert not list(tmp_path.rglob("*.so"))


def test_the_command_says_in_one_line_what_is_used():
    done = subprocess.run([sys.executable, "-m", build.__name__], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("kernels: ")
    assert done.stdout.count("\n") == 1
