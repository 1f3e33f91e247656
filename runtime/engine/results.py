"""The results of an engine's methods."""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.errors import UserError
from zeroir.runtime.engine.rank_results import RankEvaluation, RankResult


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
        return float(self.rank.loss)

    @property
    def weight(self) -> float:
        """The sum of the weights of this rank's micro-batches, or their number where they have no weights."""
        return float(self.rank.weight)

    @property
    def mean_loss(self) -> float:
        """Mean over the step's micro-batches of all ranks, weighted as ``loss`` is, the same on every rank.

        Raises:
            UserError: where the program reports no sum of losses, which compiled ones do.
        """
        if self.rank.mean_loss is None:
            raise UserError("The program does not report the loss of all ranks: compile it again.")
        return float(self.rank.mean_loss)

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
        return self.rank.is_skipped is not None and bool(self.rank.is_skipped > 0)

    @property
    def is_redone(self) -> bool:
        """Whether clipping or an overflow undid the host's speculative update; False without speculation."""
        return self.rank.is_redone is not None and bool(self.rank.is_redone > 0)

    @property
    def grad_norm(self) -> float | None:
        """The global L2 norm of the averaged gradient before clipping; None where the program does not compute it."""
        return None if self.rank.grad_norm is None else float(self.rank.grad_norm)


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
        return float(self.rank.loss)

    @property
    def weight(self) -> float:
        """The weight of the batch, as in a step; 1 where batches have no weights."""
        return float(self.rank.weight)

    @property
    def outputs(self) -> object:
        """The declared outputs in the user's structure, tensors on the engine's device; None where there are none."""
        return self.rank.outputs
