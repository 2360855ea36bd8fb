"""Who may import whom: the table of the house as data, read by tests/test_house.py.

A module obeys the first row whose pattern matches it. `ours` and `libraries` are the prefixes it may import
besides the standard library. A module that matches no row fails the test: new rooms are drawn here first.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Row:
    pattern: str
    ours: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    never: tuple[str, ...] = field(default=())

    def matches(self, module: str) -> bool:
        return any(fnmatchcase(module, part) for part in self.pattern.split())


WEB = ("fastapi", "starlette", "pydantic", "pydantic_core", "msgspec")
# What several routes share stands in files that are no routes.
SHARED = tuple(
    f"app.api.{name}"
    for name in (
        *(
            "schemas",
            "schemas_requests",
            "errors",
            "bodies",
            "large_bodies",
            "door",
            "prompts",
            "conversations",
            "answers",
        ),
        *("asking", "events", "documentation"),
    )
)
ROUTE = (*SHARED, "app.generation", "app.stream", "app.choice", "app.text", "model.protocol")

DOING = tuple(f"model.engine.{name}" for name in ("batch", "runner", "sampler", "engine", "commit", "start"))

ROWS = (
    # The room of text.
    Row("app.text.tokenizer", ("model.gguf_file", "app.text"), ("tokenizers", "sentencepiece", "jinja2", "gguf")),
    Row("app.text app.text.*", ("app.text",), ("tokenizers", "sentencepiece", "jinja2", "gguf")),
    Row("app.hub", (), ("huggingface_hub",)),
    Row("app.catalog", ("app.hub", "model.gguf_file"), ()),
    Row("app.api.schemas app.api.schemas_*", ("app.api.schemas", "model.protocol"), ("pydantic",)),
    Row("app.api.errors app.api.health", ("app.metrics", "model.protocol", "app.api.errors"), WEB),
    Row("app.api app.api.*", ROUTE, WEB),
    Row("app.process", ("model.config",), ("msgspec",)),
    Row("app.routing"),
    Row("app.worker_client", ("model.protocol", "model.wire", "model.config"), ("msgspec",)),
    Row("app.watching", ("app.worker_client",)),
    Row(
        "app.supervisor",
        (
            "app.process",
            "app.routing",
            "app.watching",
            "app.worker_client",
            "model.protocol",
            "model.wire",
            "model.config",
        ),
        ("msgspec",),
    ),
    Row("app.ledger", ("model.protocol",), ("msgspec",)),
    Row("app.choice", ("app.ledger", "app.text", "model.protocol"), ("msgspec",)),
    Row("app.faults", (), ()),
    Row("app.stream", ("app.choice", "app.faults", "app.text", "app.worker_client", "model.protocol"), ("msgspec",)),
    Row(
        "app.generation",
        ("app.stream", "app.choice", "app.faults", "app.text", "app.worker_client", "model.protocol"),
        ("msgspec",),
    ),
    Row("app.metrics", ("app.live", "model.protocol"), ("prometheus_client", "msgspec")),
    Row("app.security", (), ("starlette", "msgspec")),
    Row("app.gate", ("app.security",), ("structlog", "starlette", "msgspec")),
    Row("app.connections", (), ("uvicorn",)),
    Row("app.logs", (), ("structlog",)),
    Row("app.tracing", ("app.generation", "model.protocol"), ("opentelemetry",)),
    Row("app.live", ("model.protocol",), ("msgspec",)),
    Row("app.banner", ("model.protocol",), ("rich",)),
    Row("app.chat", (), ("rich",)),
    Row("app.playground app.playground.*", (), WEB),
    Row("app.settings", ("app", "model.config", "model.protocol"), ("pydantic", "pydantic_settings")),
    Row("app.cli app.__main__", ("app", "model.config"), ("typer", "rich", "pydantic")),
    Row(
        "app.main",
        ("app", "model.config", "model.protocol"),
        ("fastapi", "starlette", "uvicorn", "uvloop", "msgspec", "structlog"),
    ),
    Row("app"),
    # The door.
    Row("model.protocol model.config", (), ("msgspec",)),
    Row("model.wire", ("model.protocol",), ("msgspec",)),
    Row("model.gguf_file model"),
    # The room of ids and tensors.
    # Deciding: integers and dicts, no torch, nothing that imports it.
    Row(
        "model.engine.sequence model.engine.scheduler model.engine.block_pool model.engine.prefix_cache "
        "model.engine.retention model.engine.residence model.engine.stats model.engine.plan",
        ("model.engine", "model.protocol", "model.config"),
        ("msgspec",),
        DOING,
    ),
    Row("model.engine.admission", ("model.engine.retention", "model.decoder.spec", "model.protocol")),
    # Doing.
    Row("model.engine.grammar", ("model.engine", "model.protocol"), ("llguidance", "torch", "numpy")),
    Row("model.engine.engine", ("model.engine", "model.protocol", "model.config", "model.decoder"), ("torch",)),
    Row(
        "model.engine model.engine.*",
        ("model.engine", "model.protocol", "model.config", "model.decoder"),
        ("torch", "numpy"),
    ),
    Row("model.decoder.spec"),
    Row("model.decoder model.decoder.*", ("model.decoder",), ("torch", "numpy")),
    Row("model.families", ("model.families", "model.decoder.spec")),
    Row("model.families.*", ("model.decoder.spec", "model.families.shared"), ("torch",)),
    Row(
        "model.checkpoint model.checkpoint.*",
        ("model.checkpoint", "model.families", "model.decoder", "model.gguf_file"),
        ("torch", "numpy", "safetensors", "gguf", "transformers", "rich"),
    ),
    Row("model.worker", ("model",), ("torch", "msgspec")),
    # Benchmarks import app as a client, or model; nobody imports them.
    Row("bench bench.*", ("bench", "app", "model"), ("*",)),
)

# Imports inside a function, each with its reason.
LATE_IMPORTS = {
    ("app/catalog.py", "app.hub"): "the hub's library takes 0.3 s, and only hub ids need it",
    ("app/cli.py", "app.main"): "the worker is loading while the front end still imports its libraries",
    ("app/main.py", "app.tracing"): "traces are an optional extra; off means not imported",
    ("app/cli.py", "app.chat"): "only `chat` draws Markdown; serve must not wait for it",
    ("model/checkpoint/tokenizer_conversion.py", "transformers"): "its errors must come out as one sentence",
    ("model/checkpoint/opening.py", "transformers"): "folders need it, GGUF never does, and it costs three seconds",
}

# The families this project knows, by the names that must not be seen in model/decoder or model/engine.
FAMILY_WORDS = (
    "gpt2", "gptj", "gpt_neox", "gptneox", "neox", "gpt_oss", "opt", "xglm", "kogpt", "pythia", "polyglot", "llama",
    "smollm", "smollm3", "mistral", "mixtral", "qwen", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "falcon", "mpt",
    "bloom", "olmo", "olmo2", "phi3", "exaone", "exaone4", "deepseek",
)  # fmt: skip

# Fields of the decoder's spec that no family sets yet, each with what it waits for.
WAITING_FIELDS = {
    "AttentionSpec.sink_logits": "the seam takes them from day one; the families with experts bring them",
}
