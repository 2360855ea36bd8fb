"""The parts around the arithmetic: filling parameters, choosing kernels, reading ropes, packing 4-bit weights."""

import gguf
import pytest
import torch

from model.decoder.decoder import Decoder
from model.decoder.kernels import select
from model.decoder.kernels.cpu.backend import CpuBackend
from model.decoder.kernels.reference import Int4Weight, ReferenceBackend
from model.decoder.kernels.select import choose
from model.decoder.parameters import ParameterError
from model.decoder.rope import inverse_frequencies
from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from model.decoder.weights import RawWeight
from model.families.shared.rope import read_rope
from tests.parity import tiny
from tests.parity.paged import Paged, Stream

NORM = NormSpec(offset=1.0)
SPEC = DecoderSpec("toy", 11, 16, 32, (LayerSpec(AttentionSpec(2, 1, 8), MlpSpec(20)),), final_norm=NORM)


def test_each_parameter_is_filled_once_and_fits():
    decoder = Decoder(SPEC, ReferenceBackend("cpu", "float32"))
    assert "embedding" in decoder.missing()
    assert decoder.num_bytes == 0
    decoder.fill("embedding", torch.zeros(11, 16))
    assert decoder.num_bytes == 11 * 16 * 4
    with pytest.raises(ParameterError, match="'embedding' is filled twice"):
        decoder.fill("embedding", torch.zeros(11, 16))
    with pytest.raises(ParameterError, match=r"'head' has shape \(11, 16\), the checkpoint's has \(16, 11\)"):
        decoder.fill("head", torch.zeros(16, 11))
    with pytest.raises(ParameterError, match=r"no parameter 'layers\.7\.mlp\.up'"):
        decoder.fill("layers.7.mlp.up", torch.zeros(20, 16))
    assert set(decoder.missing()) == {parameter.name for parameter in decoder.parameters()} - {"embedding"}


def test_a_norm_s_offset_is_added_when_it_is_filled():
    decoder = Decoder(SPEC, ReferenceBackend("cpu", "float32"))
    decoder.fill("final_norm", torch.full((16,), 0.5))
    assert next(p for p in decoder.parameters() if p.name == "final_norm").value.tolist() == [1.5] * 16


def test_loading_keeps_no_view_of_the_checkpoint():
    """The checkpoint lets its pages go after each tensor, so what was filled must not change with them."""
    decoder = Decoder(SPEC, ReferenceBackend("cpu", "float32"))
    for parameter in decoder.parameters():
        stored = torch.ones(parameter.shape)
        decoder.fill(parameter.name, stored)
        before = getattr(parameter.value, "data", parameter.value).clone()
        stored.fill_(7.0)
        assert torch.equal(getattr(parameter.value, "data", parameter.value), before)


def test_kernels_are_chosen_by_device_and_model():
    odd = DecoderSpec("toy", 11, 16, 32, (LayerSpec(AttentionSpec(200, 1, 8), MlpSpec(20)),))
    assert isinstance(select.choose(kernels="reference"), ReferenceBackend)
    assert isinstance(select.choose(spec=odd), ReferenceBackend)
    assert isinstance(select.choose(spec=SPEC), CpuBackend)  # built by `make install`, which comes before tests
    with pytest.raises(ValueError, match=r"query heads for a key head.*--kernels reference"):
        select.choose(kernels="cpu", spec=odd)
    with pytest.raises(ValueError, match="not on cuda"):
        select.choose(device="cuda", kernels="cpu")


def test_without_a_compiler_torch_computes(monkeypatch):
    monkeypatch.setattr(select, "open_backend", lambda dtype, threads: None)
    assert isinstance(select.choose(spec=SPEC), ReferenceBackend)
    with pytest.raises(ValueError, match="make install"):
        select.choose(kernels="cpu", spec=SPEC)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_weights_multiply_as_their_values_do(kind):
    """Packed for torch's int4 product they are the file's own values: scales stay float32."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    kinds = gguf.GGMLQuantizationType
    data = torch.from_numpy(gguf.quantize(weight.numpy(), kinds[kind]))
    exact = torch.from_numpy(gguf.dequantize(data.numpy(), kinds[kind]))
    backend = ReferenceBackend("cpu", "auto")
    backend._int4 = True  # also where torch would rather not
    packed = backend.pack(RawWeight(kind, data, 48, 96))
    assert isinstance(packed, Int4Weight)
    assert packed.num_bytes < weight.numel()
    x = torch.randn(16, 96, generator=generator)
    expected = x.double() @ exact.double().T
    assert float((packed.product(x) - expected).abs().max()) < 1e-5 * float(expected.std())
    assert torch.equal(packed.product(x[3:4]), packed.product(x)[3:4])


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["qwen3", "opt-350m"])
def test_a_step_may_want_no_logits(name, kernels):
    """A chunk in the middle of a prompt: keys and values are kept, the head has nothing to do."""
    model = tiny.build(name)
    backend = choose("cpu", "float32", kernels, 1, model.spec)
    whole = Paged(model.decoder(backend), backend, block_size=8)
    expected = whole.step([(Stream(), [5, 6, 7, 8])])[0][-1:]
    paged, stream = Paged(model.decoder(backend), backend, block_size=8), Stream()
    assert paged.step([(stream, [5, 6, 7])], last=0)[0].shape == (0, model.spec.vocabulary)
    assert torch.equal(paged.step([(stream, [8])])[0], expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_stays_near_float32(name):
    model = tiny.build(name)
    ids = list(range(2, 40))
    logits = {}
    for dtype in ("float32", "bfloat16"):
        backend = ReferenceBackend("cpu", dtype)
        logits[dtype] = Paged(model.decoder(backend), backend).step([(Stream(), ids)])[0]
    assert logits["bfloat16"].dtype == torch.float32
    error = (logits["bfloat16"] - logits["float32"]).abs().mean() / logits["float32"].std()
    assert 0 < float(error) < 0.05


def test_both_spellings_of_a_rope_say_the_same():
    outer = {"max_position_embeddings": 4096, "rope_theta": 5e5}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 1024
    old = outer | {"rope_scaling": scaling | {"type": "llama3"}}
    new = {"max_position_embeddings": 4096, "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert read_rope(old, 64) == read_rope(new, 64)
    assert read_rope(new, 64).scaling == "banded"
    nested = {"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"rope_theta": 9.0}}}
    assert read_rope(nested, 8, layer_type="full_attention") == RopeSpec(dim=8, base=9.0)
    with pytest.raises(ValueError, match="'spiral' is not known"):
        read_rope(outer | {"rope_scaling": {"type": "spiral", "factor": 2.0}}, 64)


@pytest.mark.parametrize("served", [0, 30, 40, 41, 200])
def test_scalings_that_depend_on_the_length_are_chosen_from_the_served_context(served):
    common = {"max_position_embeddings": 160, "rope_theta": 100.0}
    factors = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "original_max_position_embeddings": 40}
    longrope = read_rope(common | {"rope_scaling": {"type": "longrope"} | factors}, 4, served)
    beyond = served > 40 or served == 0
    assert longrope.factors == ((3.0, 4.0) if beyond else (1.0, 2.0))
    dynamic = read_rope({"max_position_embeddings": 40, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8, served)
    changed = not torch.equal(inverse_frequencies(dynamic), inverse_frequencies(RopeSpec(dim=8)))
    assert changed == (served > 40)
