"""The weights of micro-batches: a function of a batch, the user's or the program's, and this rank's sum of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zeroir.errors import ModelWarning, UserError
from zeroir.ir.analysis.instances import with_other_sizes
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.ir.segments.bindings import plain_bindings
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.execution.batch import Shape, shape_of
from zeroir.runtime.kernels.eager import EagerKernel, compile_eager
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.batches import Batch, flatten
from zeroir.torch_ops.types import TORCH_DTYPE

WeightFunction = Callable[..., object]
"""A function from a batch to its weight: a non-negative number, or a tensor of one element."""


class BatchWeigher:
    """The function by which a program itself weighs batches, which must be like those that it was compiled for."""

    def __init__(self, program: Program, segment: Segment, arguments: Sequence[str]) -> None:
        paths = {binding.buffer: binding.path for binding in program.inputs}
        self._program = program
        self._segment = segment
        self._paths = [paths[buffer] for buffer in arguments]
        # As many shapes as the ops of a program are bound to.
        self._kernel = lru_cache(maxsize=64)(self._compiled)

    def arguments(self, batch: Batch) -> list[Tensor]:
        """Return the tensors of a batch that its weight is computed from."""
        tensors = flatten(batch).tensors
        return [tensors[path].contiguous() for path in self._paths]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        arguments = self.arguments(batch)
        device = arguments[0].device if arguments else torch.device("cpu")
        (kind,) = self._segment.output_types()
        weight = torch.empty((), dtype=TORCH_DTYPE[kind.dtype], device=device)
        self._kernel(shape_of(self._program, batch), device)(arguments, [weight])
        return weight

    def _compiled(self, shape: Shape, device: torch.device) -> EagerKernel:
        values = dict(zip((dim.name for dim in self._program.dims), shape, strict=True))
        segment = with_other_sizes(self._segment, lambda size: size.at(values))
        return compile_eager(segment, plain_bindings(segment), device)


def weighing(program: Program) -> BatchWeigher | None:
    """Return the function by which the program itself weighs batches; None if it has none."""
    segment, declared = program.weighing_segment, program.weighing
    if segment is None or declared is None:
        return None
    return BatchWeigher(program, segment, declared.arguments)


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

    Where the program itself weighs the one micro-batch of a step on one rank, it weighs 1 or 0 and rounds no gradient.
    """

    def __init__(self, memory: RankMemory, program: Program) -> None:
        self._memory = memory
        self._buffer = program.weight
        self._watched = weighing(program) if program.weight is None else None
        self._usual: float | None = None
        # What a program of several micro-batches a step does with the user's weights is the same to the last bit.
        self._is_alone = (
            program.weighing is not None
            and program.mesh.world_size == program.interleaved == 1
            and MICRO_STEP not in program.section_by_name
        )
        self._sum: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0

    def add(self, batch: Batch, function: WeightFunction | None, micro_batch: int = 0) -> None:
        """Count a batch, and write its weight to the program's buffer, at the micro-batch's index in its section."""
        if self._buffer is None:
            self._sum += 1.0
            self._counted = self._sum
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
        self._counted = element + self._counted
        if self._is_alone:
            element.sign_()
        self._sum = element + self._sum

    def _compare(self, batch: Batch) -> None:
        """Warn once where a batch is not like the ones before it, as the program expects."""
        if self._watched is None:
            return
        if any(not tensor.is_cpu for tensor in self._watched.arguments(batch)):
            return  # The host would wait for the value.
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
        self._counted = self._sum

    def take(self) -> tuple[Tensor | float, Tensor | float]:
        """Return the sum in the program and the one of the given weights, each f32[] or a number of micro-batches.

        The next step starts with 0.
        """
        total, counted = self._sum, self._counted
        self._sum = self._counted = 0.0
        return total, counted
