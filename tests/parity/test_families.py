"""Every family against the reference implementation on tiny random models in float32.

A row: prefill of prompts of several lengths (one of them in two chunks), then 32 greedy decode steps in one batch, all
through the paged cache, against the reference's own forward pass over the same tokens.
"""

import dataclasses
from typing import Any

import pytest
import torch

from model.decoder.kernels import Backend
from model.decoder.kernels.reference import ReferenceBackend
from model.decoder.kernels.select import choose
from model.decoder.parameters import ParameterError
from model.decoder.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    PositionSpec,
    RopeSpec,
)
from tests.parity import tiny
from tests.parity.paged import Paged, Stream

TOLERANCE = 1e-4  # of the logits' standard deviation
STEPS = 32
LENGTHS = (7, 40, 19)  # the second is prefilled in two chunks, the second of them beside the third


@pytest.fixture(scope="module", params=list(tiny.ROWS))
def model(request):
    return tiny.build(request.param)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, 100, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(model: Any, backend: Backend) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Prompts with their greedy continuations, and the logits at each of their tokens but the last."""
    paged = Paged(model.decoder(backend), backend, num_blocks=64, block_size=8)
    sequences = prompts()
    first, second, third = (Stream() for _ in sequences)
    (a, b) = paged.step([(first, sequences[0]), (second, sequences[1][:25])])
    (more, c) = paged.step([(second, sequences[1][25:]), (third, sequences[2])])
    logits = [[a], [b, more], [c]]
    for _ in range(STEPS):
        for sequence, parts in zip(sequences, logits, strict=True):
            sequence.append(int(parts[-1][-1].argmax()))
        rows = paged.step([(s, [ids[-1]]) for s, ids in zip((first, second, third), sequences, strict=True)])
        for parts, row in zip(logits, rows, strict=True):
            parts.append(row)
    return sequences, [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_equals_the_reference(model, kernels):
    """Both of our backends: torch, and the compiled one that serves by default."""
    sequences, ours = generate(model, choose("cpu", "float32", kernels, 1, model.spec))
    for ids, logits in zip(sequences, ours, strict=True):
        if model.row.only_longest and len(ids) < max(map(len, sequences)):
            continue
        expected = model.logits(ids)
        spread = float(expected.std())
        assert spread >= 1.0
        assert float((logits - expected).abs().max()) <= TOLERANCE * spread
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_every_field_matters(model):
    """Change each field that the family sets, one at a time: the logits must move."""
    backend = ReferenceBackend("cpu", "float32")
    ids = prompts()[1]
    expected = Paged(model.decoder(backend), backend).step([(Stream(), ids)])[0]
    dead = []
    for label, spec in flips(model.spec):
        try:
            moved = Paged(model.decoder(backend, spec), backend).step([(Stream(), ids)])[0]
        except (ParameterError, IndexError, RuntimeError):
            continue  # it cannot even run: the field is certainly read
        if moved.shape == expected.shape and not (moved - expected).abs().max() > 100 * TOLERANCE * expected.std():
            dead.append(label)
    assert set(dead) == model.row.unmoved


def test_every_field_of_the_spec_is_set_by_some_family():
    used: set[str] = set()
    for name in tiny.ROWS:
        config = getattr(tiny.transformers, tiny.ROWS[name].config)(**tiny.ROWS[name].fields)
        spec = tiny.families.BY_MODEL_TYPE[config.model_type].spec(config.to_dict(), tiny.SERVED)
        used |= {label for label, _ in flips(spec)}
    kinds = (AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, PositionSpec, RopeSpec)
    fields = {f"{kind.__name__}.{part.name}" for kind in kinds for part in dataclasses.fields(kind)}
    # A label and a limit, which no arithmetic reads; and the column that experts' families will bring.
    assert fields - used == {"DecoderSpec.family", "DecoderSpec.context", "AttentionSpec.sink_logits", *PARTS}


PARTS = {"LayerSpec.attention", "LayerSpec.mlp"}  # always there; changed by their own fields
OTHER = {
    "DecoderSpec.tied_head": lambda spec: not spec.tied_head,
    "NormSpec.kind": lambda spec: "layer" if spec.kind == "rms" else "rms",
    "NormSpec.eps": lambda spec: spec.eps + 3.0,
    "NormSpec.offset": lambda spec: spec.offset + 0.5,
    "RopeSpec.dim": lambda spec: spec.dim - 2,
    "RopeSpec.base": lambda spec: spec.base * 3,
    "RopeSpec.layout": lambda spec: "pairs" if spec.layout == "halves" else "halves",
    "RopeSpec.scaling": lambda spec: None,
    "RopeSpec.factors": lambda spec: spec.factors[::-1],
    "RopeSpec.original_context": lambda spec: spec.original_context // 2,
    "RopeSpec.served_context": lambda spec: spec.served_context * 2,
    "AttentionSpec.window": lambda spec: spec.window // 2,
    "AttentionSpec.qk_norm": lambda spec: None,
    "AttentionSpec.rope": lambda spec: None,
    "MlpSpec.activation": lambda spec: "relu" if spec.activation != "relu" else "silu",
    "PositionSpec.kind": lambda spec: "learned" if spec.kind == "sinusoidal" else "sinusoidal",
    "PositionSpec.count": lambda spec: 20,
}


def other(label: str, spec: Any, name: str) -> Any:
    """Another value for a field: as above, or by its type."""
    if label in OTHER:
        return OTHER[label](spec)
    value = getattr(spec, name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.7
    return None


def flips(spec: Any) -> list[tuple[str, Any]]:
    """(Class.field, the spec with that field changed) for each field set; in layers, changed in all that set it."""
    kind = type(spec).__name__
    found: list[tuple[str, Any]] = []
    for part in dataclasses.fields(spec):
        label, value = f"{kind}.{part.name}", getattr(spec, part.name)
        if label in ("DecoderSpec.family", "DecoderSpec.context") or value == part.default:
            continue
        if label == "DecoderSpec.layers":
            found.append((label, dataclasses.replace(spec, layers=value[:-1])))
            found.extend((inner, dataclasses.replace(spec, layers=new)) for inner, new in layer_flips(value))
            continue
        if label not in PARTS:
            found.append((label, dataclasses.replace(spec, **{part.name: other(label, spec, part.name)})))
        if dataclasses.is_dataclass(value):
            found.extend((inner, dataclasses.replace(spec, **{part.name: new})) for inner, new in flips(value))
    return found


def layer_flips(layers: tuple[LayerSpec, ...]) -> list[tuple[str, tuple[LayerSpec, ...]]]:
    """Flips of the n-th field of each distinct layer, applied wherever that layer stands."""
    found = []
    for layer in dict.fromkeys(layers):
        found.extend((label, tuple(new if each == layer else each for each in layers)) for label, new in flips(layer))
    return found
