"""Names of the implementations and dtypes, for those who must not load torch."""

from __future__ import annotations

WRITTEN, WRITTEN_AMAX, FUSED, CAUSAL = "written", "written_amax", "fused_softmax", "causal"
COMPILED, SDPA, CHECKPOINTED = "compiled", "sdpa", "checkpointed"
IMPLEMENTATIONS = (WRITTEN, COMPILED, SDPA, CHECKPOINTED, FUSED, WRITTEN_AMAX, CAUSAL)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ITEM_BYTES = {"fp32": 4, "bf16": 2}
BATCH = 8
MIB = 2**20
