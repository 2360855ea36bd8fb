"""ctypes mirrors of the structs in tape.h, layout.h and attention.h, field by field, and the functions' signatures.

Knows the C interface; a test compares the sizes with what C++ says. An edit there is an edit here.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p

ABSENT = -1  # a buffer number: no such operand
LOGITS = -2  # a buffer number: the step's result

FORMATS = {"nibble": 0, "byte": 1, "byte_signed": 2, "F32": 3, "F16": 4, "BF16": 5}
QUANTISED_KINDS = {"Q4_0": 0, "Q4_1": 1, "Q5_0": 2, "Q5_1": 3, "Q8_0": 4}
CODES = {
    name: number
    for number, name in enumerate(
        [
            "embed",
            "add_positions",
            "norm",
            "linear",
            "activate",
            "add",
            "scale",
            "clip",
            "softcap",
            "store",
            "attend",
            "select",
            "rotations",
        ]
    )
}
ACTIVATIONS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}
NORMS = {"rms": 0, "layer": 1}
PROLOGUES = {"norm": 1, "activate": 2}


class Slice(Structure):
    """Columns of a buffer."""

    _fields_ = [("buffer", c_int32), ("offset", c_int32), ("width", c_int32), ("stride", c_int32)]


class Part(Structure):
    """One weight of a linear op."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_int64),
        ("in", c_int64),
        ("column", c_int64),
        ("format", c_int32),
        ("unused", c_int32),
    ]


class Op(Structure):
    """One op of a tape."""

    _fields_ = [
        ("code", c_int32),
        ("selected", c_int32),
        ("in", Slice),
        ("in2", Slice),
        ("in3", Slice),
        ("out", Slice),
        ("prologue", c_int32),
        ("norm_kind", c_int32),
        ("groups", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("first_part", c_int32),
        ("num_parts", c_int32),
        ("layer", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotation", c_int32),
        ("offset", c_int32),
        ("unused", c_int32),
        ("window", c_int64),
        ("eps", c_float),
        ("factor", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("parts", c_void_p),
        ("slopes", c_void_p),
        ("sink_logits", c_void_p),
    ]


class RotationSpec(Structure):
    """Frequencies of one kind of rotary positions."""

    _fields_ = [("frequencies", c_void_p), ("factor", c_double), ("pairs", c_int32), ("interleaved", c_int32)]


class Batch(Structure):
    """DecoderInput as pointers."""

    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "slots", "query_start", "tables", "sink_blocks")),
        *((name, c_void_p) for name in ("recent_base", "sinks", "windows", "logit_rows")),
        *((name, c_int64) for name in ("table_stride", "tokens", "sequences", "rows")),
    ]


class Step(Structure):
    """One step: batch, cache, logits."""

    _fields_ = [
        ("batch", Batch),
        ("layers", c_void_p),
        ("block_bytes", c_void_p),
        ("block_size", c_int64),
        ("half", c_int32),
        ("unused", c_int32),
        ("logits", c_void_p),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the library's functions their types."""
    library.es_pool_start.argtypes = [c_int32]
    library.es_level_name.argtypes = []
    library.es_level_name.restype = c_char_p
    library.es_choose.argtypes = [c_int32]
    library.es_choose.restype = c_int32
    library.es_read_memory.argtypes = [c_void_p, c_int64]
    library.es_read_memory.restype = c_int64
    library.es_packed_bytes.argtypes = [c_int32, c_int64, c_int64]
    library.es_packed_bytes.restype = c_int64
    library.es_pack.argtypes = [c_int32, c_int32, c_void_p, c_void_p, c_int64, c_int64]
    library.es_tape_new.argtypes = [
        *(POINTER(Op), c_int64),
        *(POINTER(Part), c_int64),
        *(POINTER(c_int64), c_int64),
        *(POINTER(RotationSpec), c_int64),
    ]
    library.es_tape_new.restype = c_void_p
    library.es_tape_run.argtypes = [c_void_p, POINTER(Step)]
    library.es_tape_ticks.argtypes = [c_void_p, POINTER(c_int64)]
    library.es_tape_free.argtypes = [c_void_p]
    return library
