"""DecoderInput: one step's ragged batch as tensors, the only thing the decoder learns about requests.

Knows tensors; does not know where they came from. `engine/batch.py` builds it.

The block table of a sequence is compact, so a stream at position 10**7 has a short table:

    table entry      0 .. sink_blocks-1      sink_blocks ..
    logical block    0 .. sink_blocks-1      recent_base, recent_base+1, ...
    (a logical block b holds the keys of positions b*block_size .. (b+1)*block_size-1)

Before anything was evicted recent_base == sink_blocks, so entry and logical block are the same number.
Query p sees key j when j <= p and (j < sinks or j > p - window); where sinks > 0, the keys j < sinks are
seen from position min(p, sinks + window - 1). A sequence without retention has sinks 0, window NO_WINDOW.
Where p < sinks + window it must have the very bits it has without retention: such blocks are shared by all policies.
While a stream is replayed, the windows of its first queries reach back before the first block that is kept:
where recent_base > sink_blocks, of the keys before position recent_base*block_size only j < sinks are seen.
"""

from dataclasses import dataclass

from torch import Tensor

NO_WINDOW = 1 << 62


@dataclass(frozen=True)
class DecoderInput:
    """One step. Tokens of one sequence stand together, in order; a decode row is a sequence of one token."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, true positions
    slots: Tensor  # [tokens] int64: block * block_size + place in block, where the token's key and value go
    query_start: Tensor  # [sequences + 1] int32: sequence s owns tokens query_start[s] .. query_start[s+1]-1
    block_tables: Tensor  # [sequences, entries] int32, unused entries 0
    sink_blocks: Tensor  # [sequences] int32
    recent_base: Tensor  # [sequences] int64
    sinks: Tensor  # [sequences] int32
    windows: Tensor  # [sequences] int64, NO_WINDOW where none
    logit_rows: Tensor  # [rows] int64: indices of the tokens whose logits are wanted, ascending
