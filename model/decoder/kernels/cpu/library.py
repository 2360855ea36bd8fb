"""Loads the compiled kernels once a process.

Knows the shared object and how to do without one; not what is in it.
"""

import ctypes
import functools
import logging

from model.decoder.kernels.cpu.build import Unavailable, build

log = logging.getLogger(__name__)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, compiled if need be; None (after one log line) where there can be none."""
    try:
        return ctypes.CDLL(str(build()))
    except (Unavailable, OSError) as why:
        log.warning("no CPU kernels: %s; the torch reference serves instead", why)
        return None
