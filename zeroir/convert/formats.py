"""The options of an export, as the command line and Python accept them."""

from __future__ import annotations

from typing import Final, Literal

CheckpointFormat = Literal["hf", "state-dict", "dcp", "deepspeed"]
"""The formats of an export."""

AS_TRAINED: Final = "as-trained"
WeightDtype = Literal["as-trained", "f32", "bf16", "f16"]
"""The dtype of exported parameters; ``as-trained`` is that of the stored values, FP32 where masters were trained."""

MAX_SHARD_BYTES: Final = 5 * 10**9
"""The size at which Hugging Face's libraries start another file."""
