"""One prefill through a decoder: logits of every position of one sequence."""

import torch

from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.decoder.kernels.select import choose

BLOCK = 16


def reference_backend(dtype="float32"):
    return choose("cpu", dtype, "reference", 0)


def logits(decoder, backend, ids):
    """float32 [tokens, vocabulary]."""
    count = len(ids)
    blocks = -(-count // BLOCK)
    store = backend.new_kv_store(decoder.spec, blocks, BLOCK)
    inputs = DecoderInput(
        ids=torch.tensor(ids),
        positions=torch.arange(count),
        slots=torch.arange(count),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
        sink_blocks=torch.zeros(1, dtype=torch.int32),
        recent_base=torch.zeros(1, dtype=torch.int64),
        sinks=torch.zeros(1, dtype=torch.int32),
        windows=torch.full((1,), NO_WINDOW),
        logit_rows=torch.arange(count),
    )
    return decoder.run(inputs, store)
