"""The results of steps and evaluations on one rank, computed from its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.output_paths import structured
from zeroir.ir.program import UPDATE, Program
from zeroir.runtime.rank_memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The results of a step on one rank.

    ``loss`` is f32[]: the mean over the step's micro-batches of this rank, weighted where they have weights;
    ``mean_loss`` that over all ranks, or None where the program does not reduce it. ``weight`` is the sum of this
    rank's weights, f32[] or the number of micro-batches. ``is_skipped`` and ``grad_norm`` are f32[], or None where the
    program computes neither; the norm is of the averaged, unscaled gradient, before clipping. ``is_redone`` is f32[]:
    whether the host undid its speculative update, or None where the update waits. Reading a value waits for the device.
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

    The tensors of the outputs are copies, which later evaluations leave as they are.
    """

    loss: Tensor
    outputs: object


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeUpdate:
    """Values of a rank that the update may change: its mean loss and its loss scale, f32[], None without scaling."""

    loss: Tensor
    weight: Tensor | float
    loss_scale: Tensor | None


@dataclass(frozen=True, kw_only=True)
class RankResults:
    """The rules by which a program's results follow from the buffers of a rank."""

    program: Program

    @property
    def loss_name(self) -> str:
        """The buffer with the sum of a step's losses.

        Raises:
            UserError: where a program of an earlier version names none.
        """
        if self.program.loss is None:
            raise UserError("The program names no loss; compile it again.")
        return self.program.loss

    def before_update(self, memory: RankMemory, weight: Tensor | float) -> BeforeUpdate:
        """What the update may change, copied; ``weight`` is the sum of the weights of the rank's micro-batches."""
        return BeforeUpdate(
            loss=memory.buffer(self.loss_name)[0].clone() / weight,
            weight=weight,
            loss_scale=self.loss_scale(memory),
        )

    def after_update(self, memory: RankMemory, before: BeforeUpdate) -> RankResult:
        """The results of the step that the update ended."""
        decide = self.decision
        total: Tensor | int = self.program.mesh.world_size
        if decide is not None and decide.weight is not None:
            total = decide.divisor * memory.region(decide.weight)[0]
        mean_loss = None
        if self._is_loss_reduced and self.program.loss is not None:
            mean_loss = memory.buffer(self.program.loss)[0] / total
        elif self.program.mesh.world_size == 1:
            mean_loss = before.loss
        if decide is None:
            return RankResult(
                loss=before.loss,
                weight=before.weight,
                mean_loss=mean_loss,
                is_skipped=None,
                grad_norm=None,
            )
        skip, norm = decide.skip, None
        if decide.norm is not None:
            divisor = total if decide.weight is not None else decide.divisor
            scale = before.loss_scale
            norm = memory.region(decide.norm)[0].sqrt() / (
                divisor if scale is None else divisor * scale
            )
        return RankResult(
            loss=before.loss,
            weight=before.weight,
            mean_loss=mean_loss,
            is_skipped=None if skip is None else memory.region(skip)[0].clone(),
            grad_norm=norm,
            is_redone=None if decide.redo is None else memory.region(decide.redo)[0].clone(),
        )

    def evaluation(self, memory: RankMemory) -> RankEvaluation:
        """The results of the section ``evaluate``, which has just run."""
        assert self.program.eval_loss is not None
        values = [
            (output.path, memory.buffer(output.buffer).clone().view(output.shape))
            for output in self.program.outputs
        ]
        return RankEvaluation(
            loss=memory.buffer(self.program.eval_loss)[0].clone(), outputs=structured(values)
        )

    def loss_scale(self, memory: RankMemory) -> Tensor | None:
        """A copy of the loss scale, f32[]; None where the program has none."""
        decide = self.decision
        if decide is None or decide.loss_scale is None:
            return None
        return memory.region(decide.loss_scale)[0].clone()

    @cached_property
    def decision(self) -> ops.Decide | None:
        """The one decision of the program's update, None where it has none."""
        return next((op for op in self.program.ops() if isinstance(op, ops.Decide)), None)

    @cached_property
    def _is_loss_reduced(self) -> bool:
        """Whether the update leaves the sum over all ranks, along every axis of the mesh, in the loss buffer."""
        section = self.program.section_by_name.get(UPDATE)
        summed: set[str] = set()
        for op in () if section is None else section.body:
            match op:
                case ops.AllReduce():
                    if any(p.destination.buffer == self.program.loss for p in op.pairs):
                        summed.add(self.program.comm_by_name[op.comm].axis)
                case ops.Fill() if op.destination.buffer == self.program.loss:
                    summed.clear()
                case _:
                    pass
        axes = {axis.name for axis in self.program.mesh.axes if axis.size > 1}
        return bool(summed) and axes <= summed
