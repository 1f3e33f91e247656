"""The results of steps and evaluations: those of a rank, read from its buffers, and what the engine returns of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroir.errors import UserError, explain_device_assert
from zeroir.ir.output_paths import structured
from zeroir.ir.program import Program
from zeroir.ir.reports import Quantity, Storing
from zeroir.ir.sizes import Size
from zeroir.runtime.memory.rank_memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The results of a step on one rank.

    ``loss`` is f32[]: the mean over the step's micro-batches of this rank, weighted where they have weights;
    ``mean_loss`` is that over all ranks, or None where the program does not report it. ``weight`` is the sum of this
    rank's weights, f32[] or the number of micro-batches. ``is_skipped`` and ``grad_norm`` are f32[], or None where the
    program does not report them; the norm is that of the averaged, unscaled gradient, before clipping. ``is_redone`` is
    f32[]: whether the host undid its speculative update, or None without speculation. Reading a value synchronizes with
    the device.
    """

    loss: Tensor
    weight: Tensor | float
    mean_loss: Tensor | None
    is_skipped: Tensor | None
    grad_norm: Tensor | None
    is_redone: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvaluation:
    """The results of an evaluation on one rank: the loss of its batch, f32[], and the declared outputs.

    The outputs are copies, which later evaluations do not change. ``weight`` is that of the batch, a number or a tensor
    of one element; 1 where the program has no weights.
    """

    loss: Tensor
    outputs: object
    weight: Tensor | float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeUpdate:
    """Values of a rank that the update may change: its mean loss, and its loss scale, f32[] or None without scaling."""

    loss: Tensor
    weight: Tensor | float
    loss_scale: Tensor | None


@dataclass(frozen=True, kw_only=True)
class RankResults:
    """Reads the results of a program from a rank's buffers that its reports name."""

    program: Program

    def batch_losses(self, memory: RankMemory) -> Tensor:
        """Return copies of the losses of the micro-batches of the section that has just run: f32[Program.interleaved].

        Raises:
            UserError: where the program reports none.
        """
        return self._required(memory, Quantity.BATCH_LOSS).clone()

    def before_update(
        self, memory: RankMemory, total: Tensor | float, weight: Tensor | float
    ) -> BeforeUpdate:
        """Copy what the update may change; ``total`` and ``weight`` are the sums that ``RankWeights.take`` returns."""
        return BeforeUpdate(
            loss=self._required(memory, Quantity.LOSS)[0].clone() / total,
            weight=weight,
            loss_scale=self.loss_scale(memory),
        )

    def after_update(self, memory: RankMemory, before: BeforeUpdate) -> RankResult:
        """Return the results of the step that the update ended."""
        # Without weights from the host, each micro-batch has the weight 1, and all ranks have the same number of them.
        total: Tensor | float = self.program.mesh.world_size * before.weight
        if self.program.weight is not None:
            total = self._required(memory, Quantity.SUMMED_WEIGHT)[0]
        summed_loss = self._reported(memory, Quantity.SUMMED_LOSS)
        squared_norm = self._reported(memory, Quantity.SQUARED_NORM)
        norm = None
        if squared_norm is not None:
            scale = before.loss_scale
            norm = squared_norm[0].sqrt() / (total if scale is None else total * scale)
        skip = self._reported(memory, Quantity.SKIP)
        redo = self._reported(memory, Quantity.REDO)
        return RankResult(
            loss=before.loss,
            weight=before.weight,
            mean_loss=None if summed_loss is None else summed_loss[0] / total,
            is_skipped=None if skip is None else skip[0].clone(),
            grad_norm=norm,
            is_redone=None if redo is None else redo[0].clone(),
        )

    def evaluation(
        self, memory: RankMemory, weight: Tensor | float, dims: Sequence[int] = ()
    ) -> RankEvaluation:
        """Return the results of the section ``evaluate``, which has just run for a batch with these values of dims."""
        return RankEvaluation(
            loss=self._required(memory, Quantity.EVAL_LOSS)[0].clone(),
            outputs=structured(list(self.outputs(memory, None, dims).items())),
            weight=weight,
        )

    def outputs(
        self, memory: RankMemory, stored: Storing | None, dims: Sequence[int] = ()
    ) -> dict[str, Tensor]:
        """Return copies of the outputs that an evaluation returns, or that the user's code stores then, by path.

        ``dims`` are the values of dims of the batch of the section that has just run.
        """
        by_name = dict(zip((dim.name for dim in self.program.dims), dims, strict=True))
        values: dict[str, Tensor] = {}
        for output in self.program.outputs:
            if output.stored is stored:
                shape = [s.at(by_name) if isinstance(s, Size) else s for s in output.shape]
                elements = memory.buffer(output.buffer)[: math.prod(shape)]
                values[output.path] = elements.clone().view(shape)
        return values

    def loss_scale(self, memory: RankMemory) -> Tensor | None:
        """Return a copy of the loss scale, f32[]; None where the program has none."""
        scale = self._reported(memory, Quantity.LOSS_SCALE)
        return None if scale is None else scale[0].clone()

    def _reported(self, memory: RankMemory, quantity: Quantity) -> Tensor | None:
        report = self.program.report_of.get(quantity)
        return None if report is None else memory.buffer(report.buffer)

    def _required(self, memory: RankMemory, quantity: Quantity) -> Tensor:
        values = self._reported(memory, quantity)
        if values is None:
            raise UserError(f"The program does not report its {quantity}: compile it again.")
        return values


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepResult:
    """The results of ``Engine.step`` on this rank. Reading a value synchronizes with the device."""

    rank: RankResult
    kept: tuple[object, ...] = ()
    """What ``outputs`` returns, if the step was asked for it."""

    def __repr__(self) -> str:
        values = {
            "loss": self.loss,
            "mean_loss": None if self.rank.mean_loss is None else self.mean_loss,
            "weight": self.weight,
            "grad_norm": self.grad_norm,
            "is_skipped": None if self.rank.is_skipped is None else self.is_skipped,
            "is_redone": None if self.rank.is_redone is None else self.is_redone,
        }
        known = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{type(self).__name__}({known})"

    @property
    def loss(self) -> float:
        """Mean over the step's micro-batches of this rank, weighted by their weights; NaN where all of them are 0."""
        return _number(self.rank.loss)

    @property
    def weight(self) -> float:
        """The sum of the weights of this rank's micro-batches, or their number where they have no weights."""
        return _number(self.rank.weight)

    @property
    def mean_loss(self) -> float:
        """Mean over the step's micro-batches of all ranks, weighted as ``loss`` is, the same on every rank.

        Raises:
            UserError: where the program reports no sum of losses, which compiled ones do.
        """
        if self.rank.mean_loss is None:
            raise UserError("The program does not report the loss of all ranks: compile it again.")
        return _number(self.rank.mean_loss)

    @property
    def outputs(self) -> object:
        """What the loss function or forward returned for the last batch beside the loss, detached.

        This is the rest of a tuple, or a dict of what has tensors beside ``loss``; None where there is nothing.

        Raises:
            UserError: where the step was not asked for it.
        """
        if not self.kept:
            raise UserError(
                "The step was not asked for its outputs: call engine.step(batch, outputs=True)."
            )
        return self.kept[0]

    @property
    def is_skipped(self) -> bool:
        """Whether the update was skipped, because of an overflow on any rank or a weight of 0 on all ranks."""
        return self.rank.is_skipped is not None and _number(self.rank.is_skipped) > 0

    @property
    def is_redone(self) -> bool:
        """Whether clipping or an overflow undid the host's speculative update; False without speculation."""
        return self.rank.is_redone is not None and _number(self.rank.is_redone) > 0

    @property
    def grad_norm(self) -> float | None:
        """The global L2 norm of the averaged gradient before clipping; None where the program does not compute it."""
        return None if self.rank.grad_norm is None else _number(self.rank.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluation:
    """The results of ``Engine.evaluate`` on this rank. Reading the loss synchronizes with the device."""

    rank: RankEvaluation

    def __repr__(self) -> str:
        weight = "" if self.weight == 1 else f", weight={self.weight}"
        outputs = "" if self.outputs is None else f", outputs={self.outputs}"
        return f"{type(self).__name__}(loss={self.loss}{weight}{outputs})"

    @property
    def loss(self) -> float:
        """The loss of this rank's batch."""
        return _number(self.rank.loss)

    @property
    def weight(self) -> float:
        """The weight of the batch, as in a step; 1 where batches have no weights."""
        return _number(self.rank.weight)

    @property
    def outputs(self) -> object:
        """The declared outputs in the user's structure, tensors on the engine's device; None where there are none."""
        return self.rank.outputs


def _number(value: Tensor | float) -> float:
    """Return the number that a device computed; UserError where a kernel before it refused a value."""
    try:
        return float(value)
    except RuntimeError as error:
        refusal = explain_device_assert(error, "in the step")
        if refusal is None:
            raise
        raise UserError(refusal) from error
