"""The CPU backend: our C++ kernels behind the seam. Records a decoder once, replays it with one call a step.

Knows weights, caches and steps; the arithmetic is in the .cpp files beside it, the oracle in reference.py.
"""

import ctypes
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model.decoder.inputs import DecoderInput
from model.decoder.kernels import Forward, KVStore
from model.decoder.kernels.cpu import packed, structs
from model.decoder.kernels.cpu.fuse import TapeArrays, assemble, fuse
from model.decoder.kernels.cpu.kv_store import CpuStore
from model.decoder.kernels.cpu.library import load_library
from model.decoder.kernels.cpu.record import Recorder
from model.decoder.spec import DecoderSpec
from model.decoder.weights import RawWeight

MOST_TOKENS = 1024  # of one call; a larger step is run in slices, which changes no bit of its result
_MOST_ROWS = 128  # query heads that share a kv head


def unsupported(spec: DecoderSpec) -> str | None:
    """Why these kernels cannot run a decoder, in a sentence; None where they can."""
    for number, layer in enumerate(spec.layers):
        attention = layer.attention
        if attention.heads // attention.kv_heads > _MOST_ROWS:
            return f"layer {number} has more than {_MOST_ROWS} query heads for a key head"
    return None


def physical_cores() -> int:
    """Cores this process may run on, a pair of hardware threads counted once."""
    allowed = os.sched_getaffinity(0)
    seen = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        seen.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, len(seen))


def open_backend(dtype: str = "auto", threads: int = 0) -> "CpuBackend | None":
    """The backend, or None (after one log line) where the kernels cannot be had."""
    library = load_library()
    return None if library is None else CpuBackend(library, dtype, threads)


class _Tape:
    """A recorded decoder: the C++ object and the tensors it points to."""

    def __init__(self, library: ctypes.CDLL, decoder: Forward) -> None:
        recorder = Recorder()
        result = decoder.forward(recorder)
        self._arrays: TapeArrays = assemble(fuse(recorder.nodes), result)
        arrays = self._arrays
        self.vocabulary: int = result.width
        self.handle: int = library.es_tape_new(
            *(arrays.ops, len(arrays.ops)),
            *(arrays.parts, len(arrays.parts)),
            *(arrays.widths, len(arrays.widths)),
            *(arrays.rotations, len(arrays.rotations)),
        )
        weakref.finalize(self, library.es_tape_free, self.handle)


class CpuBackend:
    """`dtype` "float32" computes with float32 weights and cache; otherwise quantised weights stay as they are,
    other matrices are bfloat16 (float16 where they were), and the cache is float16."""

    def __init__(self, library: ctypes.CDLL, dtype: str = "auto", threads: int = 0) -> None:
        self._library = structs.declare(library)
        self._exact = dtype == "float32"
        self._tapes: weakref.WeakKeyDictionary[Forward, _Tape] = weakref.WeakKeyDictionary()
        self.threads = threads or physical_cores()
        self._library.es_pool_start(self.threads)
        self.lasting_rows = 0
        self._logits = torch.empty(0)
        torch.set_num_threads(1)  # ours is the only pool: torch's would spin on the same cores
        path = self._library.es_level_name().decode()
        self.name = f"cpu {path} float32" if self._exact else f"cpu {path}"

    def pack(self, weight: RawWeight, lookup: bool = False) -> packed.PackedWeight:
        """One form for all row counts, also for lookups."""
        return packed.pack(self._library, weight, self._exact)

    def place(self, tensor: Tensor) -> Tensor:
        """Vectors and tables are float32."""
        return tensor.to(torch.float32, copy=True).contiguous()

    def new_kv_store(self, spec: DecoderSpec, num_blocks: int, block_size: int) -> CpuStore:
        """An empty cache. Raises ValueError for a decoder or block size these kernels cannot run."""
        reason = unsupported(spec)
        if reason is not None:
            raise ValueError(reason)
        return CpuStore(spec, num_blocks, block_size, half=not self._exact)

    def run(self, decoder: Forward, inputs: DecoderInput, store: KVStore) -> Tensor:
        """One step: float32 logits [rows, vocabulary]."""
        if not isinstance(store, CpuStore):
            raise TypeError("the CPU kernels run on a cache of their own making")
        tape = self._tapes.get(decoder)
        if tape is None:
            tape = self._tapes[decoder] = _Tape(self._library, decoder)
        logits = self._room(inputs.logit_rows.shape[0], tape.vocabulary)
        row = 0
        for part in slices(inputs, MOST_TOKENS):
            rows = part.logit_rows.shape[0]
            self._step(tape, part, store, logits[row : row + rows])
            row += rows
        return logits

    def _room(self, rows: int, width: int) -> Tensor:
        """Memory for a step's logits. Fresh pages for megabytes every step cost milliseconds, and out of the heap they
        leave holes that small things settle in, so that a server would grow: where the caller allows, it stays."""
        if rows > self.lasting_rows:
            return torch.empty(rows, width)
        if self._logits.numel() < rows * width:
            self._logits = torch.empty(min(self.lasting_rows, 2 * rows) * width)
        return self._logits[: rows * width].view(rows, width)

    def shares(self, decoder: Forward) -> dict[str, float]:
        """Where the time went since the last call: each kind of op's share of the steps (barriers included)."""
        ticks = (ctypes.c_int64 * len(structs.CODES))()
        self._library.es_tape_ticks(self._tapes[decoder].handle, ticks)
        total = sum(ticks) or 1
        return {name: ticks[code] / total for name, code in structs.CODES.items() if ticks[code]}

    def _step(self, tape: _Tape, inputs: DecoderInput, store: CpuStore, logits: Tensor) -> None:
        tensors = {
            "ids": (inputs.ids, torch.int64),
            "positions": (inputs.positions, torch.int64),
            "slots": (inputs.slots, torch.int64),
            "query_start": (inputs.query_start, torch.int32),
            "tables": (inputs.block_tables, torch.int32),
            "sink_blocks": (inputs.sink_blocks, torch.int32),
            "recent_base": (inputs.recent_base, torch.int64),
            "sinks": (inputs.sinks, torch.int32),
            "windows": (inputs.windows, torch.int64),
            "logit_rows": (inputs.logit_rows, torch.int64),
        }
        held = {name: tensor.to(dtype).contiguous() for name, (tensor, dtype) in tensors.items()}
        batch = structs.Batch(
            **{name: tensor.data_ptr() for name, tensor in held.items()},
            table_stride=inputs.block_tables.shape[1],
            tokens=inputs.ids.shape[0],
            sequences=inputs.sinks.shape[0],
            rows=inputs.logit_rows.shape[0],
        )
        step = structs.Step(
            batch=batch,
            layers=store.pointers.data_ptr(),
            block_bytes=store.block_bytes.data_ptr(),
            block_size=store.block_size,
            half=int(store.half),
            logits=logits.data_ptr(),
        )
        self._library.es_tape_run(tape.handle, ctypes.byref(step))


def slices(inputs: DecoderInput, most: int) -> Iterator[DecoderInput]:
    """The step cut into pieces of at most `most` tokens, in order: as if its prompts had come in chunks."""
    tokens = inputs.ids.shape[0]
    if tokens <= most:
        yield inputs
        return
    starts = inputs.query_start.to(torch.int64)
    for begin in range(0, tokens, most):
        end = min(begin + most, tokens)
        members = ((starts[1:] > begin) & (starts[:-1] < end)).nonzero().flatten()
        edges = torch.cat((starts[members], starts[members[-1:] + 1])).clamp(begin, end) - begin
        rows = inputs.logit_rows[(inputs.logit_rows >= begin) & (inputs.logit_rows < end)] - begin
        yield replace(
            inputs,
            ids=inputs.ids[begin:end],
            positions=inputs.positions[begin:end],
            slots=inputs.slots[begin:end],
            query_start=edges.to(torch.int32),
            block_tables=inputs.block_tables[members],
            sink_blocks=inputs.sink_blocks[members],
            recent_base=inputs.recent_base[members],
            sinks=inputs.sinks[members],
            windows=inputs.windows[members],
            logit_rows=rows,
        )
