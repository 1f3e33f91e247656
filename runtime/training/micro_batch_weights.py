"""The weights of micro-batches: a function of a batch, the user's or the program's, and this rank's sum of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from zeroir.errors import ModelWarning, UserError
from zeroir.ir.analysis.instances import with_other_sizes
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.execution.batch import inputs_of, shape_of
from zeroir.runtime.kernels.calls import is_multiple, operator, resolver
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.batches import Batch, flatten

WeightFunction = Callable[..., object]
"""A function from a batch to its weight: a non-negative number, or a tensor of one element."""


def weighing(program: Program) -> WeightFunction | None:
    """Return the function by which the program itself weighs batches; None if it has none."""
    segment, declared = program.weighing_segment, program.weighing
    if segment is None or declared is None:
        return None
    names = [dim.name for dim in program.dims]

    @lru_cache(maxsize=64)  # as many shapes as the ops of a program are bound to
    def of_shape(shape: tuple[int, ...]) -> Segment:
        values = dict(zip(names, shape, strict=True))
        return with_other_sizes(segment, lambda size: size.at(values))

    def weight(batch: Batch) -> Tensor:
        tensors = {binding.buffer: tensor for binding, tensor in inputs_of(program, batch)}
        arguments = [tensors[buffer].contiguous() for buffer in declared.arguments]
        return _result(of_shape(shape_of(program, batch)), arguments)

    return weight


@torch.no_grad()
def _result(segment: Segment, arguments: list[Tensor]) -> Tensor:
    """Return a segment's only result, computed node by node."""
    device = arguments[0].device if arguments else torch.device("cpu")
    values: list[Tensor | None] = [*arguments]
    for node in segment.nodes:
        function = operator(node.op)
        args = [resolver(arg, device)(values) for arg in node.args]
        kwargs = {name: resolver(arg, device)(values) for name, arg in node.kwargs}
        returned = function(*args, **kwargs)
        values += returned if is_multiple(function) else [returned]
    result = values[segment.outputs[0]]
    assert result is not None
    return result


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

    Without a buffer for weights each micro-batch weighs 1. A program may say how to compute weights nevertheless: then
    the first batch on the CPU with another one than its predecessors is warned of.
    """

    def __init__(self, memory: RankMemory, program: Program) -> None:
        self._memory = memory
        self._buffer = program.weight
        self._watched = weighing(program) if program.weight is None else None
        self._usual: float | None = None
        self._sum: Tensor | float = 0.0

    def add(self, batch: Batch, function: WeightFunction | None, micro_batch: int = 0) -> None:
        """Count a batch, and write its weight to the program's buffer, at the micro-batch's index in its section."""
        if self._buffer is None:
            self._sum += 1.0
            self._compare(batch)
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

    def _compare(self, batch: Batch) -> None:
        """Warn once where a batch is not like the ones before it, as the program expects."""
        if self._watched is None or any(not x.is_cpu for x in flatten(batch).tensors.values()):
            return  # Elsewhere the host would wait for the value.
        weight = float(weight_of(self._watched, batch))
        if self._usual is None or weight == self._usual:
            self._usual = weight
            return
        self._watched = None
        warnings.warn(
            "Batches have different numbers of labels that the loss counts, but count alike in the mean over the job, "
            "because the example batch has no ignored label: compile with --mean-over elements to count each label "
            "alike, or with --mean-over batches if this is meant.",
            ModelWarning,
            stacklevel=2,
        )

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
