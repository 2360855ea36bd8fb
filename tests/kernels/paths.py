"""The kernels' two paths for tests: AVX2, and AVX-512 on the processor itself or by emulation.

Knows how to get at a path's library and how to switch it; a library has one path at a time.
"""

import ctypes
import functools

import pytest

from model.decoder.kernels.cpu import build
from model.decoder.kernels.cpu.backend import CpuBackend
from model.decoder.kernels.cpu.library import load_library
from tests.kernels import emulation

LEVELS = {"avx2": 0, "avx512": 1}
EMULATION_FLAGS: tuple[str, ...] = ()  # of the compiler; sanitized.py sets its own


def processor_has_avx512() -> bool:
    """Whether the library chose AVX-512 by itself."""
    library = load_library()
    return library is not None and choose(library, "avx512")


def choose(library: ctypes.CDLL, path: str) -> bool:
    """Take `path` from now on; False where the processor cannot, and AVX2 stays."""
    return library.es_choose(LEVELS[path]) == LEVELS[path]


@functools.cache
def library_of(path: str) -> ctypes.CDLL | None:
    """The library a path is tested on; None where `why_not` has a reason or the emulation does not compile."""
    library = load_library()
    if library is None or path == "avx2" or processor_has_avx512():
        return library
    try:
        return ctypes.CDLL(str(emulation.emulated(EMULATION_FLAGS)))
    except build.Unavailable as why:
        print(why)
        return None


def why_not(path: str) -> str:
    """Why a path cannot be tested here; nothing where it can."""
    if load_library() is None:
        return "no CPU kernels on this machine"
    return "" if path == "avx2" or processor_has_avx512() else emulation.missing()


@functools.cache
def _opened(library: ctypes.CDLL, dtype: str) -> CpuBackend:
    return CpuBackend(library, dtype, 2)


def backend(path: str, dtype: str) -> CpuBackend:
    """A backend that computes on `path` until another one is asked for; skips the test where it cannot."""
    reason = why_not(path)
    if reason:
        pytest.skip(reason)  # headers of the emulation are missing (CI installs them), or there is no compiler
    library = library_of(path)
    assert library is not None, "the emulated kernels do not compile"
    opened = _opened(library, dtype)
    assert choose(library, path)
    return opened
