"""The weights of micro-batches: the user's function of a batch, and this rank's sum of a step's weights."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from zeroir.errors import UserError
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.batches import Batch

WeightFunction = Callable[..., object]
"""A function from a batch to its weight: a non-negative number, or a tensor of one element."""


def weight_of(function: WeightFunction, batch: Batch) -> float | Tensor:
    """Return the weight of a batch. The value of a tensor on a device other than the CPU is not read.

    Raises:
        UserError: where the function fails, or its value is not a finite number or negative.
    """
    try:
        weight = function(batch)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or "no message"
        raise UserError(f"weight(batch) failed: {type(error).__name__}: {reason}") from error
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise UserError(
                f"weight(batch) returned a tensor of the shape {tuple(weight.shape)}; return one number."
            )
        if weight.device.type != "cpu":
            return weight.detach()
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UserError(f"weight(batch) returned {type(weight).__name__}; return one number.")
    if not math.isfinite(weight) or weight < 0:
        raise UserError(
            f"weight(batch) returned {weight}; return a finite number that is not negative."
        )
    return float(weight)


class RankWeights:
    """The sum of the weights of this rank's micro-batches since the last step started.

    Without a buffer for weights each micro-batch weighs 1.
    """

    def __init__(self, memory: RankMemory, buffer: str | None) -> None:
        self._memory = memory
        self._buffer = buffer
        self._sum: Tensor | float = 0.0

    def add(self, batch: Batch, function: WeightFunction | None, micro_batch: int = 0) -> None:
        """Count a batch, and write its weight to the program's buffer, at the micro-batch's index in its section."""
        if self._buffer is None:
            self._sum += 1.0
            return
        if function is None:
            raise UserError(
                "The program takes a weight for each batch: give the engine the function weight(batch) that the "
                "program was compiled with."
            )
        weight = weight_of(function, batch)
        element = self._memory.buffer(self._buffer)[micro_batch]
        if isinstance(weight, Tensor):
            element.copy_(weight.reshape(()), non_blocking=True)
        else:
            element.fill_(weight)
        self._sum = element + self._sum

    @property
    def sum(self) -> float:
        """The sum so far; reading it synchronizes with the device."""
        return float(self._sum)

    def go_on(self, total: float) -> None:
        """Start with the sum that another run of the step had."""
        if self._buffer is None:
            self._sum = total
        else:
            self._sum = self._memory.buffer(self._buffer).new_tensor(total)

    def take(self) -> Tensor | float:
        """Return the sum, f32[] or a number of micro-batches; the next step starts with 0."""
        total, self._sum = self._sum, 0.0
        return total
