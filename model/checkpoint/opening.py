"""From a path to an opened checkpoint: its format, its family, its spec and its tensors' names; no weight is read.

Knows formats and where each keeps its configuration. Names no family: those come from the registry.
GGUF never needs `transformers`; folders use its AutoConfig, which fills in what config files leave out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import families
from model.checkpoint.gguf import GgufSource
from model.checkpoint.naming import Books, assign
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import Source, TensorInfo
from model.checkpoint.torch_bin import TorchBinSource
from model.decoder.spec import DecoderSpec
from model.gguf_file import CheckpointError

_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000
_LARGEST_SIZE = 1 << 24
_LONGEST_CONTEXT = 1 << 31
_LONGEST_TABLE = 1 << 20  # where positions are a table, which is held in memory


@dataclass(frozen=True)
class Opened:
    """A checkpoint ready to be loaded or looked at. `books` say where each tensor of `table` goes."""

    path: Path
    format: str
    architecture: str
    family: families.Family
    spec: DecoderSpec
    source: Source
    table: Mapping[str, TensorInfo]
    books: Books
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def open_checkpoint(path: str | Path, context: int = 0) -> Opened:
    """Open a `.gguf` file, a `.safetensors` file or a model folder; raises CheckpointError with one sentence.

    `context` is the served context in tokens (0: the model's own); some rope scalings are chosen by it.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a .gguf file, a model folder, or a name from the catalog.")
    if path.is_dir():
        single = sorted(path.glob("*.gguf"))
        if single and not (path / "config.json").exists():
            return _open_gguf(single[0], context)
        return _open_folder(path, context)
    if path.suffix == ".safetensors":
        return _open_folder(path.parent, context)
    return _open_gguf(path, context)


def _open_gguf(path: Path, context: int) -> Opened:
    source = GgufSource(path)
    table = source.table()
    architecture = source.metadata.get("general.architecture")
    family = families.BY_GGUF_ARCHITECTURE.get(str(architecture))
    if family is None:
        raise _unknown(path, architecture, families.BY_GGUF_ARCHITECTURE)
    embedding = table.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no token embedding; give the model's main file, not an adapter or a part.")
    _check_layers(path, source.metadata.get(f"{architecture}.block_count"), len(table))
    metadata = dict(source.metadata) | {
        "vocab_size": embedding.shape[0],
        "tensor_names": frozenset(table),
        "tensor_values": _configuration_tensors(source, table),
    }
    spec = _spec(path, lambda: family.spec(family.gguf_config(metadata), context))
    books = assign(
        table,
        family.GGUF_NAMES,
        where=str(path),
        tied_head=spec.tied_head,
        num_layers=len(spec.layers),
    )
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return Opened(
        path=path,
        format="GGUF",
        architecture=str(architecture),
        family=family,
        spec=spec,
        source=source,
        table=table,
        books=books,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if isinstance(end, int))),
    )


def _configuration_tensors(source: GgufSource, table: Mapping[str, TensorInfo]) -> dict[str, tuple[float, ...]]:
    """Small tensors that are configuration: the divisors of a rope scaling."""
    return {
        name: tuple(source.read(name).tolist())
        for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
        if name in table and table[name].kind == "F32" and len(table[name].shape) == 1
    }


def _open_folder(folder: Path, context: int) -> Opened:
    stated = _read_json(folder / "config.json")
    architecture = stated.get("model_type")
    family = families.BY_MODEL_TYPE.get(str(architecture))
    if family is None:
        raise _unknown(folder / "config.json", architecture, families.BY_MODEL_TYPE)
    if stated.get("quantization_config"):
        method = dict(stated["quantization_config"]).get("quant_method", "an unknown method")
        raise CheckpointError(
            f"{folder} is quantised with {method}, which is not served; take the original weights or a GGUF file."
        )
    for key in _LAYER_KEYS:
        _check_layers(folder, stated.get(key), _MOST_LAYERS)
    config = _complete_config(folder)
    spec = _spec(folder, lambda: family.spec(config, context))
    source, format_name = _folder_source(folder)
    table = source.table()
    books = assign(
        table,
        family.NAMES,
        where=str(folder),
        prefix=getattr(family, "PREFIX", ""),
        tied_head=spec.tied_head,
        num_layers=len(spec.layers),
    )
    generation = folder / "generation_config.json"
    stated_ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return Opened(
        path=folder,
        format=format_name,
        architecture=str(architecture),
        family=family,
        spec=spec,
        source=source,
        table=table,
        books=books,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_ids(stated_ends if stated_ends is not None else config.get("eos_token_id")),
    )


def _folder_source(folder: Path) -> tuple[Source, str]:
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return SafetensorsSource(folder), "safetensors"
    if (folder / "pytorch_model.bin").exists() or (folder / "pytorch_model.bin.index.json").exists():
        return TorchBinSource(folder), "PyTorch .bin"
    raise CheckpointError(f"{folder} holds no weights (*.safetensors or pytorch_model.bin); download the model again.")


def _complete_config(folder: Path) -> dict[str, Any]:
    """config.json with the defaults filled in. Imported late: it costs seconds, and GGUF never comes here."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        completed: dict[str, Any] = config.to_dict()
    except Exception as error:  # the library raises errors of many kinds for a config that it cannot take
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{folder}/config.json cannot be used ({reason[:300]}); correct it.") from error
    return completed


def _spec(path: Path, build: Callable[[], DecoderSpec]) -> DecoderSpec:
    """The family's spec; what it cannot make sense of becomes one sentence."""
    try:
        spec = build()
        _check_sizes(spec)
        return spec
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path}: its configuration lacks {error}; download the model again.") from error
    except (ValueError, TypeError, ArithmeticError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: its configuration cannot be served ({error}); use another checkpoint."
        ) from error


def _check_layers(path: Path, count: object, most: int) -> None:
    """Before anything is built of them: a damaged count must not fill the memory."""
    if isinstance(count, int) and not 0 < count <= most:
        raise CheckpointError(f"{path}: its configuration claims {count} layers; download the model again.")


def _check_sizes(spec: DecoderSpec) -> None:
    """Sizes that no model has; raises ValueError."""
    named = {"vocabulary": spec.vocabulary, "width": spec.width}
    for layer in spec.layers[:_MOST_LAYERS]:
        attention = layer.attention
        named |= {"heads": attention.heads, "key heads": attention.kv_heads, "head width": attention.head_dim}
        named |= {"feed-forward width": layer.mlp.width, "rotary width": attention.rope.dim if attention.rope else 2}
        if not 0 < attention.kv_heads <= attention.heads or attention.heads % attention.kv_heads:
            raise ValueError(f"{attention.heads} heads cannot share {attention.kv_heads} key heads")
        if attention.rope and (attention.rope.dim > attention.head_dim or attention.rope.dim % 2):
            raise ValueError(f"heads of {attention.head_dim} cannot turn {attention.rope.dim} of their entries")
    for name, size in named.items():
        if not 0 < size <= _LARGEST_SIZE:
            raise ValueError(f"a {name} of {size}")
    longest = _LONGEST_TABLE if spec.positions is not None else _LONGEST_CONTEXT
    if not 0 < spec.context <= longest:
        raise ValueError(f"a context of {spec.context} tokens")


def _unknown(path: Path, architecture: object, known: Mapping[str, object]) -> CheckpointError:
    return CheckpointError(
        f"{path}: the architecture {architecture!r} is not known; known are {', '.join(sorted(known))}."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give a folder with a whole model.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again.")
    return value


def _ids(value: object) -> tuple[int, ...]:
    """Token ids from an id, a list of them or nothing."""
    if isinstance(value, list | tuple):
        return tuple(int(item) for item in value if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()
