"""EngineConfig: everything a worker is told at birth, one frozen value, sent as JSON on its command line.

Knows names and numbers only; the front end builds it, the worker reads it, nothing else changes it.
"""

from msgspec import Struct


class EngineConfig(Struct, frozen=True, kw_only=True):
    """One worker's settings. Sizes are tokens unless a name says otherwise.

    `model` is a local path (a `.gguf` file or a folder); names and hub ids were resolved before.
    `dtype`: "auto" serves quantised weights as they are and others in bfloat16 where kernels exist;
    "float32" dequantises everything. `kernels`: "auto", "cpu" (our C++), or "reference" (torch).
    `num_blocks` 0 sizes the cache from `cache_bytes`; `context` 0 takes the model's own.
    `cores`: CPUs this worker may run on; empty for all of the machine's.
    `fault_token` is a test hook: a sequence holding this id kills the worker during its step.
    """

    model: str
    name: str
    socket: str
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"
    threads: int = 0
    cores: tuple[int, ...] = ()
    block_size: int = 16
    num_blocks: int = 0
    cache_bytes: int = 1 << 30
    context: int = 0
    token_budget: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    max_stream_tokens: int = 10_000_000
    prefix_cache: bool = True
    fault_token: int = -1
