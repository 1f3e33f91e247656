"""The programs among which an engine changes: after changes of the user's code, and for batches of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.ir.mesh import VALUES_COMM
from zeroir.ir.reports import Storing
from zeroir.runtime.checkpoint.snapshots import require_same_sums
from zeroir.runtime.engine.code_follower import CodeFollower, Compile, CompileEagerly
from zeroir.runtime.engine.model_values import ModelValues
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.engine.signatures import Signatures
from zeroir.runtime.engine.watched_code import CompiledAgain, WatchedCode
from zeroir.runtime.state import state as state_of_buffers
from zeroir.runtime.training.lr_schedule import Scheduler
from zeroir.torch_ops.batches import Batch

FitBatches = Callable[[Sequence[Batch], bool], None]
"""Makes the engine go on with programs that take these batches, of an evaluation or not."""


class PresentPrograms:
    """The programs of the present state of the user's code, ``signatures``, one of which runs.

    ``go_on_among`` lets the engine go on with others, which it does between micro-steps only. ``scheduler`` is that of
    the program's schedule, if the script asked for it.
    """

    def __init__(
        self,
        running: CompiledAgain,
        rank_program: RankProgram,
        values: ModelValues,
        go_on_among: Callable[[Signatures], None],
    ) -> None:
        self.signatures = Signatures(running)
        self.scheduler: Scheduler | None = None
        self._rank_program = rank_program
        self._values = values
        self._go_on_among = go_on_among
        self._is_closed = False
        self._followed = CodeFollower(
            rank_program.job.rank,
            lambda: rank_program.optimizer_if_any,
            values.step_counts,
            rank_program.meet_for_change,
        )

    def close(self) -> None:
        """Run nothing any more, and let the script's optimizers update again."""
        self._is_closed = True
        self._followed.release()

    @property
    def model(self) -> nn.Module | None:
        """The user's module, where there is one in this process."""
        return self._followed.model

    @property
    def reads_tensors(self) -> bool:
        """Whether the running program has constants whose present values count."""
        return self._followed.reads_tensors

    def follow(
        self, code: WatchedCode, signatures: Signatures, compile_again: Compile | None
    ) -> None:
        """Follow the code of the running program, which is one of ``signatures``, as ``Engine.follow`` does."""
        self._followed.follow(code)
        self.signatures = signatures
        if compile_again is not None:
            self._followed.compile_with(compile_again, signatures)

    def compile_changes_with(self, compile_again: Compile) -> None:
        """Go on with what this function compiles after a change of the user's code; it keeps programs itself."""
        self._followed.compile_with(compile_again)

    def compile_eagerly_with(self, compile_eagerly: CompileEagerly) -> None:
        """Let ``eager`` return what this function compiles."""
        self._followed.compile_eagerly_with(compile_eagerly)

    def eager(self) -> Signatures:
        """Return a program whose steps call the user's code as it is, which need not be one that can be traced.

        Raises:
            UserError: if the code asks for the ranks, which it finds in a trace.
        """
        if VALUES_COMM in self._rank_program.program.comm_by_name:
            raise UserError(
                "The model gathers tensors of all ranks, or asks for the rank or the number of ranks, which is part "
                "of a program alone: engine.eager() is for other models."
            )
        if self._followed.trains_others:
            self.look_outside()
        return self._followed.compiled_eagerly(self._values.others)

    def change_to(self, signatures: Signatures, chosen: CompiledAgain) -> None:
        """Switch to one of these programs; all ranks do so unless these are the present ones."""
        rank_program = self._rank_program
        rank_program.executor.require_intact()
        state_of_buffers.require_same_state(
            rank_program.program, chosen.program, self._values.others
        )
        if rank_program.executor.micro_steps_done:
            chosen = signatures.for_several(chosen)
            require_same_sums(rank_program.program, chosen.program)
        among = signatures.programs if signatures is self.signatures else []
        self._values.go_on_with(chosen.program, among)
        self.signatures, signatures.running = signatures, chosen
        if chosen.code is None:
            self._followed.remember()
        else:
            self._followed.follow(chosen.code, signatures.base.code)

    def run(self, chosen: CompiledAgain) -> None:
        """Let one of the present programs run from now on, with the present values of the user's tensors."""
        if chosen is not self.signatures.running:
            self.change_to(self.signatures, chosen)
        self.read_outside()

    def accumulate(self) -> None:
        """Switch to the program for gradient accumulation."""
        signatures = self.signatures
        self.change_to(signatures, signatures.for_several(signatures.running))

    def fitting(
        self,
        batches: Sequence[Batch],
        fit: FitBatches,
        *,
        accumulates: bool = False,
        is_evaluation: bool = False,
    ) -> list[CompiledAgain]:
        """Return a program for each of these batches of this rank, once ``fit`` has considered them."""
        if not is_evaluation:  # which says itself that it begins
            self._rank_program.begin_batches()
        while True:
            present = self.signatures
            fit(batches, is_evaluation)
            if self.signatures is present:
                break
            # They may not follow what changed while others ran, and what is compiled instead may not fit.
            self.look_outside(is_step=not is_evaluation)
        return self.signatures.fitting(
            batches, self._rank_program.job, accumulates=accumulates, is_evaluation=is_evaluation
        )

    def look_outside(self, *, is_step: bool = True) -> None:
        """Follow what changed outside, and raise UserError where something did that cannot be followed."""
        if self._is_closed:
            raise UserError("The engine was closed: make another one to train or evaluate.")
        _require_no_autocast()
        self._followed.follow_optimizers()
        changed = self._followed.changed_programs(is_step=is_step)
        if changed is not None:
            again, change = changed
            try:
                self._go_on_among(again)
            except UserError as error:
                raise UserError(f"{change} It cannot go on with another program: {error}") from None
            # It may have groups that the earlier one had not.
            self._followed.follow_optimizers()
        if self.scheduler is not None:
            self.scheduler.follow_groups()
        if self._followed.reads_tensors:
            self._followed.borrow(self.signatures.codes)

    def follow_optimizers(self) -> None:
        """Apply the changes of the script's optimizers."""
        self._followed.follow_optimizers()

    def read_outside(self) -> None:
        """Read the present values of the user's tensors."""
        if self._followed.reads_tensors:
            rank_program = self._rank_program
            rank_program.allocate_once()
            with rank_program.executor.entered():
                self._followed.read_tensors(rank_program.program, rank_program.memory)

    def keep(self, moment: Storing, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors where the user's code would store them."""
        self._followed.keep(moment, tensors)


def _require_no_autocast() -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise UserError(
                f"The engine is called within torch.autocast('{device}'), which changes nothing in a program: leave "
                "that block and compile with precision='bf16' or 'fp16', or enter autocast in forward or in the loss "
                "function."
            )
