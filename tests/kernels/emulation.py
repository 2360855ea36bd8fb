"""The kernels with their AVX-512 path running on emulated 512-bit instructions, for processors that have none.

Not a test itself. Knows how to compile the same sources against SIMDe's portable intrinsics (`libsimde-dev`); the
library it gives believes that the processor has AVX-512, and its AVX2 path is the usual one.
"""

from pathlib import Path

from model.decoder.kernels.cpu import build

HEADER = Path(__file__).parent / "avx512_emulated.h"
SIMDE = Path("/usr/include/simde/x86/avx512.h")


def missing() -> str:
    """Why there can be no emulation here; nothing where there can."""
    return "" if SIMDE.exists() else "SIMDe's headers are not here (install libsimde-dev to test AVX-512 by emulation)"


def emulated(more_flags: tuple[str, ...] = ()) -> Path:
    """Path of the shared object; raises build.Unavailable where the sources do not compile."""
    # -O1: SIMDe is all inline functions; -O3 takes minutes over hundreds of calls.
    return build.compiled("emulated", ("-O1", "-Wno-psabi", f'-DES_EMULATED="{HEADER}"', *more_flags), [HEADER])
