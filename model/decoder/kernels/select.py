"""Which backend computes: our C++ where it can run, torch everywhere else.

Knows backends by name and what each needs; no arithmetic, no model.
"""

from model.decoder.kernels import Backend
from model.decoder.kernels.reference import ReferenceBackend


def choose(device: str = "cpu", dtype: str = "auto", kernels: str = "auto", threads: int = 0) -> Backend:
    """The backend for `EngineConfig`'s device, dtype, kernels and threads.

    Raises ValueError with a sentence when the combination cannot run.
    """
    if kernels == "cpu":
        raise ValueError("the C++ kernels are not built: run `make install`, or use --kernels reference")
    return ReferenceBackend(device, dtype, threads)
