"""Retention in every family: honoured where positions can slide, refused with a reason where they cannot.

Where it is honoured: a window without sinks is, for the reference implementation, only another attention mask; so each
family's window stream is held to it. Sinks are held to their definition in test_retention.py; here they must count.
"""

import pytest
import torch

from model.decoder.kernels.reference import ReferenceBackend
from model.decoder.policies import policies, policy_refusals
from tests.parity import tiny
from tests.parity.paged import Paged, Stream

SINKS, WINDOW = 4, 14
TABLES = {"gpt2", "gpt2-unscaled", "opt", "opt-350m", "opt-plain-norms", "xglm"}  # positions are added to the embedding
# The reference makes its ALiBi penalties from a padding mask, so it takes no mask of ours there.
PENALISED = {"falcon-rw", "mpt", "mpt-scaled", "bloom"}
SLIDING = [name for name in tiny.ROWS if name not in TABLES]
IDS = [(11 * place * place + 5) % 100 + 2 for place in range(tiny.SERVED)]


@pytest.fixture(scope="module", params=SLIDING)
def model(request):
    return tiny.build(request.param)


@pytest.mark.parametrize("name", tiny.ROWS)
def test_each_policy_is_honoured_or_refused_with_a_reason(name):
    config = getattr(tiny.transformers, tiny.ROWS[name].config)(**tiny.ROWS[name].fields)
    spec = tiny.families.BY_MODEL_TYPE[config.model_type].spec(config.to_dict(), tiny.SERVED)
    refused = policy_refusals(spec)
    if name in TABLES:
        assert policies(spec) == ("none", "restart")
        assert set(refused) == {"sinks", "window"}
        for sentence in refused.values():
            assert str(spec.positions.count) in sentence
            assert "restart" in sentence
    else:
        assert policies(spec) == ("none", "sinks", "window", "restart")
        assert not refused


def streamed(model, chunk: int, **policy) -> torch.Tensor:
    backend = ReferenceBackend("cpu", "float32")
    paged, stream = Paged(model.decoder(backend), backend), Stream(**policy)
    parts = [paged.step([(stream, IDS[start : start + chunk])])[0] for start in range(0, len(IDS), chunk)]
    if policy:
        assert len(stream.blocks) * paged.block_size <= SINKS + WINDOW + chunk + 2 * paged.block_size
    return torch.cat(parts)


def masked_reference(model) -> torch.Tensor:
    """The reference's logits when every layer's window is at most WINDOW."""
    place = torch.arange(len(IDS))
    behind = place[:, None] - place[None, :]
    lowest = torch.finfo(torch.float32).min

    def mask(window: int | None) -> torch.Tensor:
        seen = (behind >= 0) & (behind < min(window or WINDOW, WINDOW))
        return torch.where(seen, 0.0, lowest)[None, None]

    windows = [layer.attention.window for layer in model.spec.layers]
    kinds = getattr(model.reference.config, "layer_types", None)
    masks = {"full_attention": mask(None), "sliding_attention": mask(min((w for w in windows if w), default=None))}
    given = masks if kinds and "sliding_attention" in kinds else mask(windows[0])
    with torch.inference_mode():
        return model.reference(torch.tensor([IDS]), attention_mask=given, use_cache=False).logits[0]


def test_a_window_is_honoured(model, request):
    ours = streamed(model, 5, window=WINDOW)
    assert torch.equal(ours, streamed(model, 16, window=WINDOW))
    if request.node.callspec.params["model"] in PENALISED:
        everything = streamed(model, 16)
        assert torch.allclose(ours[:WINDOW], everything[:WINDOW], atol=1e-5)
        assert float((ours - everything)[WINDOW:].abs().max()) > 0.01 * float(everything.std())
    else:
        expected = masked_reference(model)
        assert float((ours - expected).abs().max()) <= 1e-4 * float(expected.std())


def test_sinks_are_honoured(model):
    ours = streamed(model, 5, sinks=SINKS, window=WINDOW)
    assert torch.equal(ours, streamed(model, 16, sinks=SINKS, window=WINDOW))
    without = streamed(model, 16, window=WINDOW)
    assert torch.allclose(ours[:WINDOW], without[:WINDOW], atol=1e-4)
    trained = [layer.attention.window for layer in model.spec.layers]
    moved = float((ours - without)[WINDOW + SINKS :].abs().max()) / float(without.std())
    if all(window is not None and window <= WINDOW for window in trained):
        assert moved == 0  # every layer keeps its own smaller mask
    else:
        assert moved > 0.01
