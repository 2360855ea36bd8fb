"""Settings: every choice of the service as one frozen value, from flags and EVERSTREAM_* variables.

The only file that reads the environment. Knows names, ranges, defaults and their help texts; does not know
what the choices do. A flag beats a variable, a variable beats the default; an unknown variable is refused.
"""

import difflib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.config import EngineConfig
from model.protocol import Retention, RetentionPolicy

PREFIX = "EVERSTREAM_"
DEFAULT_MODEL = "smollm2-135m-instruct"
MOST_PROMPTS = 512  # in one request, as app.api.schemas_requests has it, whose import would delay the worker's start


class SettingsError(Exception):
    """A flag or variable holds what it may not; the text is one sentence that names it."""


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


def option(default: Any, group: str, text: str, *, flag: bool = True, **limits: Any) -> Any:
    """One setting: its default, the heading it stands under in --help, what it means, and its range.

    `flag=False` leaves a setting to the environment alone (secrets must not stand in a process list).
    """
    return Field(default, description=text, json_schema_extra={"group": group, "flag": flag}, **limits)


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where models lie when nobody says otherwise: the user's cache folder, by the XDG convention."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "everstream" / "models"


class Settings(BaseSettings):
    """All settings of one server. Sizes are tokens and times seconds unless a name says otherwise."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    # Model
    model: str = option(
        DEFAULT_MODEL, "Model", "catalog name, local folder, .gguf file, or hub id (owner/name, owner/name@revision)"
    )
    served_name: str = option("", "Model", "name that clients use; empty takes the model's own")
    model_cache: AbsolutePath = Field(
        default_factory=default_cache,
        description="folder that pulled models are kept in",
        json_schema_extra={"group": "Model", "flag": True},
    )
    hub_endpoint: str = option("", "Model", "address of another model hub; empty takes huggingface_hub's own")
    device: str = option("cpu", "Model", "cpu, cuda, cuda:1, or several with commas, dealt out to the workers")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Model", "arithmetic; auto serves quantised weights as they are, float32 expands everything"
    )
    kernels: Literal["auto", "cpu", "reference"] = option(
        "auto", "Model", "auto takes our C++ kernels where they are built, reference is plain torch"
    )
    context: int = option(0, "Model", "longest sequence without retention, 2 at least; 0 takes the model's own", ge=0)

    # Server
    host: str = option("127.0.0.1", "Server", "address to listen on; a public one needs API keys or --insecure")
    port: int = option(8000, "Server", "port to listen on; 0 takes a free one", ge=0, le=65535)
    grace: float = option(30.0, "Server", "seconds that running streams get after SIGTERM", ge=0)
    silence: float = option(15.0, "Server", "seconds without a write until a stream gets a comment line", gt=0)
    request_timeout: float | None = option(None, "Server", "longest life of a request; none by default", gt=0)
    max_connections: int = option(4096, "Server", "open connections, beyond which new ones get 503", ge=1)
    max_body_bytes: ByteSize = option(ByteSize(16 << 20), "Server", "largest request body", ge=1024)
    max_header_bytes: ByteSize = option(ByteSize(64 << 10), "Server", "largest request head", ge=1024)
    header_timeout: float = option(10.0, "Server", "seconds a client has to send its request head", gt=0)
    body_timeout: float = option(30.0, "Server", "seconds a client has to send its request body", gt=0)
    write_timeout: float = option(30.0, "Server", "seconds a client may leave a write waiting", gt=0)
    stream_buffer: int = option(4096, "Server", "tokens kept for a slow reader before its stream is ended", ge=16)

    # Engine
    workers: int = option(1, "Engine", "worker processes, each with its own copy of the model", ge=1, le=64)
    threads: int = option(0, "Engine", "threads a worker; 0 shares the physical cores out", ge=0, le=1024)
    block_size: int = option(16, "Engine", "tokens in a KV block, a multiple of 8", ge=8, le=1024, multiple_of=8)
    num_blocks: int = option(0, "Engine", "KV blocks, exactly; 0 sizes the cache by --cache-bytes", ge=0, le=1 << 40)
    cache_bytes: ByteSize = option(ByteSize(1 << 30), "Engine", "memory for the KV cache, e.g. 2GiB", ge=1 << 20)
    token_budget: int = option(512, "Engine", "most tokens computed in one step", ge=1)
    max_sequences: int = option(64, "Engine", "most sequences in one step", ge=1)
    prefix_cache: bool = option(True, "Engine", "share KV blocks between prompts that begin alike")
    resume: bool = option(True, "Engine", "take streams up again when a worker dies; else each gets an error")
    fault_token: int = option(-1, "Engine", "test hook: a sequence holding this id kills its worker", flag=False)

    # Queue
    max_waiting: int = option(512, "Queue", "most requests waiting, beyond which new ones get 429", ge=1)
    max_waiting_tokens: int = option(1 << 20, "Queue", "most prompt tokens waiting", ge=0)
    queue_timeout: float | None = option(None, "Queue", "longest wait in the queue; none by default", gt=0)

    # Retention
    retention: RetentionPolicy = option("none", "Retention", "policy of requests that name none")
    sink_tokens: int = option(4, "Retention", "first tokens of a stream that stay, where a request does not say", ge=0)
    window: int = option(1020, "Retention", "recent tokens that stay, where a request does not say", ge=1)
    max_stream_tokens: int = option(
        10_000_000, "Retention", "longest stream under retention, prompt included", ge=2, le=10_000_000
    )

    # Security
    api_keys: str = option("", "Security", "API keys, separated by commas", flag=False, repr=False)
    api_keys_file: AbsolutePath | None = option(None, "Security", "file with an API key a line, read again on change")
    insecure: bool = option(False, "Security", "allow a public address without API keys")
    protect_health: bool = option(False, "Security", "ask for a key at /health too")
    protect_metrics: bool = option(False, "Security", "ask for a key at /metrics too")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = option(
        (), "Security", "origins of web pages that may call, separated by commas; none by default"
    )

    # Observability
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Observability", "least level to log")
    log_prompts: bool = option(False, "Observability", "write prompts into the log")
    otlp_endpoint: str = option("", "Observability", "OTLP/HTTP address to send traces to; empty sends none")

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Settings":
        if self.context == 1:
            raise ValueError("context (1) holds no token beside a prompt's; choose a longer --context, or 0")
        if self.retention != "window" and self.sink_tokens >= self.window:
            text = f"sink_tokens ({self.sink_tokens}) must be fewer than window ({self.window})"
            raise ValueError(f"{text}; choose fewer --sink-tokens or a longer --window")
        return self

    @property
    def default_retention(self) -> Retention:
        """What a request gets that does not speak of retention."""
        return Retention(policy=self.retention, sink_tokens=self.sink_tokens, window=self.window)

    def engine_configs(self, model_path: Path, name: str) -> list[EngineConfig]:
        """One configuration a worker, devices and CPU cores dealt out between them; `socket` is still empty."""
        devices = [part.strip() for part in self.device.split(",") if part.strip()] or ["cpu"]
        shares = share_cores(physical_cores(), self.workers)
        return [
            EngineConfig(
                model=str(model_path),
                name=self.served_name or name,
                socket="",
                device=devices[number % len(devices)],
                dtype=self.dtype,
                kernels=self.kernels,
                threads=self.threads or len(shares[number]),
                cores=shares[number] if self.workers > 1 else (),
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                cache_bytes=int(self.cache_bytes),
                context=self.context,
                token_budget=self.token_budget,
                max_sequences=self.max_sequences,
                # The front end bounds the queue; one request beyond it may bring a list of prompts, each byte a token.
                max_waiting=self.max_waiting + MOST_PROMPTS,
                max_waiting_tokens=self.max_waiting_tokens + int(self.max_body_bytes),
                max_stream_tokens=self.max_stream_tokens,
                prefix_cache=self.prefix_cache,
                fault_token=self.fault_token,
            )
            for number in range(self.workers)
        ]


def load(**flags: Any) -> Settings:
    """Settings from flags (those that are not None) over the environment.

    Raises SettingsError, one sentence a fault, on a bad value or an unknown EVERSTREAM_* variable.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    known = [name.upper() for name in Settings.model_fields]
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable.removeprefix(PREFIX) not in known:
            close = difflib.get_close_matches(variable.removeprefix(PREFIX), known, 1)
            hint = (
                f"did you mean {PREFIX}{close[0]}?" if close else "see `python -m app serve --help` for the settings."
            )
            raise SettingsError(f"The environment variable {variable} is no setting; {hint}")
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(fault, given) for fault in error.errors())) from error


def _sentence(fault: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    name = str(fault["loc"][0])
    where = f"--{name.replace('_', '-')}" if name in given else f"{PREFIX}{name.upper()}"
    return f"{where} is {fault['input']!r}: {message[0].lower()}{message[1:]}"


def physical_cores() -> list[int]:
    """One logical CPU for each physical core this process may run on, lowest number first."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


def share_cores(cores: list[int], workers: int) -> list[tuple[int, ...]]:
    """The cores in contiguous, nearly equal shares, one a worker; with fewer cores than workers, one each in turn."""
    if len(cores) < workers:
        return [(cores[number % len(cores)],) for number in range(workers)]
    ends = [len(cores) * number // workers for number in range(workers + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(ends)]
