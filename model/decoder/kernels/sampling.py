"""The compiled sampler through ctypes: mirrors of the structs in cpu/sample.h, and one call a step for all rows.

Knows arrays, numbers and addresses; no requests, no protocol. `open_sampler` is None where there are no kernels;
the engine's numpy reference serves then.
"""

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from ctypes import Structure, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.decoder.kernels.cpu.library import load_library

STAGES = 7
FINE, NOT_FINITE, ALL_CUT = 0, 1, 2

_POINTERS = (
    *("bias_ids", "bias_values", "allowed", "words", "word_ends", "breakers"),
    *("history", "seen", "anywhere", "output"),
)
_COUNTS = ("num_bias", "num_allowed", "num_words", "num_breakers", "num_history", "num_seen")
NUMBERS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
WHOLE = ("top_k", "dry_allowed_length", "dry_range", "logprobs", "trace")
_ROW = struct.Struct("=qqqqq")
_RESULT = struct.Struct("=iiddq")


class Controls(Structure):
    """es::Controls."""

    _fields_ = [
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _COUNTS),
        ("seed", c_uint64),
        *((name, c_double) for name in NUMBERS),
        *((name, c_int64) for name in WHOLE),
    ]


class Candidates(Structure):
    """es::Candidates."""

    _fields_ = [("width", c_int64), ("ids", c_void_p), ("logprobs", c_void_p), ("stages", c_void_p)]


@dataclass(frozen=True)
class Outcome:
    """What one row gave. `status` FINE, NOT_FINITE or ALL_CUT; `stages` [candidates + 1, STAGES] where traced."""

    token: int
    status: int
    logprob: float
    entropy: float
    rank: int


class ControlBlock:
    """One choice's controls where the compiled sampler reads them, and the arrays they point to."""

    def __init__(self, numbers: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], seed: int) -> None:
        """`numbers`: a value for each of NUMBERS and WHOLE. `arrays`: bias_ids (int32) and bias_values (float64),
        allowed, breakers, words (int32) and word_ends (int64); those that are empty are off."""
        self._struct = Controls(seed=seed & (1 << 64) - 1, **{name: numbers[name] for name in (*NUMBERS, *WHOLE)})
        self._arrays = dict(arrays)
        for name, array in arrays.items():
            if len(array):
                setattr(self._struct, name, address(array))
        for count, name in (("bias", "bias_ids"), ("allowed", "allowed"), ("words", "word_ends"), ("breakers",) * 2):
            setattr(self._struct, f"num_{count}", len(arrays[name]))
        self.address = ctypes.addressof(self._struct)

    def point_at(self, name: str, array: NDArray[Any]) -> None:
        """Read `name` (seen, anywhere or output) from this int32 array from now on."""
        if self._arrays.get(name) is not array:
            self._arrays[name] = array
            setattr(self._struct, name, address(array))

    def remember(self, history: int, num_history: int, num_seen: int) -> None:
        """Where the stream's last ids are, and how many slots of the occurrences are in use."""
        self._struct.history = history
        self._struct.num_history = num_history
        self._struct.num_seen = num_seen


class CompiledSampler:
    """All rows of a step in one call."""

    def __init__(self, library: ctypes.CDLL, vocabulary: int) -> None:
        self._library = library
        self._vocabulary = vocabulary

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[tuple[int, int, int, int, int]],
        width: int,
        probabilities: NDArray[np.float32] | None = None,
    ) -> tuple[list[Outcome], "Table"]:
        """One outcome a row, from float32 logits [rows, vocabulary] and (address of its controls, address of banned
        ids, their number, choice, index). `width`: candidates a row that asks for some. `probabilities`
        [rows, vocabulary], if given, is filled with the final distributions."""
        count = len(rows)
        table = Table(count, width)
        wanted = bytearray(count * _ROW.size)
        for place, row in enumerate(rows):
            _ROW.pack_into(wanted, place * _ROW.size, *row)
        results = bytearray(count * _RESULT.size)
        self._library.es_sample(
            logits.data_ptr(),
            count,
            self._vocabulary,
            (ctypes.c_char * len(wanted)).from_buffer(wanted),
            (ctypes.c_char * len(results)).from_buffer(results),
            ctypes.byref(table.struct),
            None if probabilities is None else address(probabilities),
        )
        return list(_outcomes(results)), table

    def logprobs(self, logits: Tensor, ids: Sequence[int], width: int) -> tuple[list[Outcome], "Table"]:
        """The given id of each row under the model's own distribution, with `width` candidates."""
        table = Table(len(ids), width)
        wanted = np.asarray(ids, dtype=np.int32)
        results = bytearray(len(ids) * _RESULT.size)
        self._library.es_logprobs(
            logits.data_ptr(),
            len(ids),
            self._vocabulary,
            address(wanted),
            width,
            (ctypes.c_char * len(results)).from_buffer(results),
            ctypes.byref(table.struct),
        )
        return list(_outcomes(results)), table


class Table:
    """Candidates and stages of all rows."""

    def __init__(self, rows: int, width: int) -> None:
        self._ids = np.empty((rows, width), dtype=np.int32)
        self._logprobs = np.empty((rows, width), dtype=np.float64)
        self._stages = np.empty((rows, width + 1, STAGES), dtype=np.float64) if width else np.empty(0)
        self.struct = Candidates(width, address(self._ids), address(self._logprobs), address(self._stages))

    def top(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """A row's candidates, best first."""
        ids, logprobs = self._ids[row, :count].tolist(), self._logprobs[row, :count].tolist()
        return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)

    def stages(self, row: int, count: int) -> tuple[tuple[float, ...], ...]:
        """Probabilities of a row's candidates after each stage, the chosen token last."""
        return tuple(tuple(line) for line in self._stages[row, : count + 1].tolist())


def address(array: NDArray[Any]) -> int:
    """Where an array's data begins."""
    where: int = array.__array_interface__["data"][0]
    return where


def _outcomes(results: bytearray) -> Iterator[Outcome]:
    for token, status, logprob, entropy, rank in _RESULT.iter_unpack(results):
        yield Outcome(token, status, logprob, entropy, rank)


def open_sampler(vocabulary: int, threads: int) -> CompiledSampler | None:
    """The compiled sampler; None where there are no kernels. The pool of threads is the decoder's."""
    library = load_library()
    if library is None:
        return None
    pointer, size = c_void_p, c_int64
    library.es_sample.argtypes = [pointer, size, size, pointer, pointer, pointer, pointer]
    library.es_sample.restype = None
    library.es_logprobs.argtypes = [pointer, size, size, pointer, size, pointer, pointer]
    library.es_logprobs.restype = None
    library.es_sample_struct_bytes.argtypes = [c_int32]
    library.es_sample_struct_bytes.restype = c_int64
    if threads > library.es_pool_threads():
        library.es_pool_start(threads)
    return CompiledSampler(library, vocabulary)
