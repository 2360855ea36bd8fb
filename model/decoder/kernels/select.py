"""Which backend computes: our C++ where it can run, torch everywhere else.

Knows backends by name and what each needs; no arithmetic, no model.
"""

import logging

from model.decoder.kernels import Backend
from model.decoder.kernels.cpu.backend import open_backend, unsupported
from model.decoder.kernels.reference import ReferenceBackend
from model.decoder.spec import DecoderSpec

_log = logging.getLogger(__name__)


def choose(
    device: str = "cpu", dtype: str = "auto", kernels: str = "auto", threads: int = 0, spec: DecoderSpec | None = None
) -> Backend:
    """The backend for `EngineConfig`'s device, dtype, kernels and threads, and for the decoder of `spec` if given.

    "auto" takes our C++ on the CPU where it is built and can run the decoder, torch otherwise. Raises
    ValueError with a sentence when what was asked for by name cannot run.
    """
    if kernels == "reference" or (kernels == "auto" and device != "cpu"):
        return ReferenceBackend(device, dtype, threads)
    if device != "cpu":
        raise ValueError(f"the C++ kernels run on the CPU, not on {device}: use --device cpu or --kernels reference")
    reason = None if spec is None else unsupported(spec)
    backend = open_backend(dtype, threads) if reason is None else None
    if backend is not None:
        return backend
    if kernels == "cpu":
        problem = reason or "the C++ kernels are not built (run `make install` where there is a compiler)"
        raise ValueError(f"{problem}: use --kernels reference")
    if reason is not None:
        _log.warning("torch computes, since %s", reason)
    return ReferenceBackend(device, dtype, threads)
