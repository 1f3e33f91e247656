"""The GPT of `gpt.py` with 32 layers: its training state is ten times as large as the device memory that it gets.

    zeroir compile examples/deep_gpt.py --memory-budget 10MB --offload adaptive --recompute '*'

Parameters, gradients and the two moments of AdamW take 102 MB in FP32. With a budget of 10 MB, most of
them wait in host memory, and only what the next layers need is on the device.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from examples import gpt
else:
    # A model file imports its neighbours by name.
    import gpt

LAYERS = 32
BATCH = 4


def init(module: nn.Module) -> None:
    """Initialise in place the parameters that `module` itself holds."""
    gpt.init(module)


def model() -> nn.Module:
    """Build the model; `init` is then called on each of its modules."""
    return gpt.GPT(gpt.WIDTH, gpt.HEADS, LAYERS)


def batch() -> tuple[Tensor, Tensor]:
    """Return one rank's micro-batch by shape and type: tokens and targets, (BATCH, LENGTH)."""
    return _few(gpt.batch())


def batches(
    rank: int, world_size: int, seed: int, start_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches for ever: the first BATCH samples of each batch of `gpt.py`."""
    return map(_few, gpt.batches(rank, world_size, seed, start_step))


def _few(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, targets = pair
    return tokens[:BATCH], targets[:BATCH]
