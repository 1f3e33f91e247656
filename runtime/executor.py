"""The loop over the sections of a program: it issues every op, in order, on the op's stream.

It decides nothing: only what is in the program happens. Streams say when an op runs, handlers what it does, a comm how
ranks exchange elements, and kernels how a segment is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.profiler import record_function

from zeroir.errors import (
    MEMORY_REMEDY,
    InternalError,
    UserError,
    ZeroirError,
    is_out_of_memory,
)
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.labels import labels
from zeroir.ir.output_paths import structured
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    OpPosition,
    Section,
    why_not_evaluate,
)
from zeroir.runtime import state
from zeroir.runtime.batch import write_inputs
from zeroir.runtime.comm.job import (
    LostPeersError,
    is_lost_connection,
)
from zeroir.runtime.handlers import LocalRanks
from zeroir.runtime.rank_memory import RankMemory
from zeroir.runtime.seeds import site_seed
from zeroir.runtime.streams import Streams
from zeroir.runtime.trace import Task, Watch
from zeroir.torch_ops.batches import Batch

RunSection = Callable[[Section, Callable[[], None]], None]
"""Carries out a section whose ops the function submits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The results of a step on one rank.

    ``loss`` is f32[]: the mean over the step's micro-batches of this rank; ``mean_loss`` that over all ranks, or None
    where the program does not reduce it. ``is_skipped`` and ``grad_norm`` are f32[], or None where the program
    computes neither; the norm is of the averaged, unscaled gradient, before clipping. Reading a value waits for the
    device.
    """

    loss: Tensor
    mean_loss: Tensor | None
    is_skipped: Tensor | None
    grad_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvaluation:
    """The results of an evaluation on one rank: the loss of its batch, f32[], and the declared outputs.

    The tensors of the outputs are copies, which later evaluations leave as they are.
    """

    loss: Tensor
    outputs: object


class StepExecutor:
    """Runs the sections of a program for the local ranks; the engine and lockstep share it."""

    def __init__(
        self,
        local_ranks: LocalRanks,
        streams: Streams,
        *,
        seed: int = 0,
        run_section: RunSection | None = None,
    ) -> None:
        self.local_ranks = local_ranks
        self.step_count = 0
        self.seed = seed
        self._program = local_ranks.program
        self._streams = streams
        self._run_section = run_section
        self._rng_buffers = [b.name for b in self._program.buffers if b.role is Role.RNG]
        self._to_watch: tuple[int, Watch] | None = None
        self._is_begun = False
        self._prepared: dict[str, list[Task]] = {}
        self._bound: dict[tuple[str, Watch | None], list[Task]] = {}

    def step(self, batches: Sequence[Sequence[Batch]]) -> list[RankResult]:
        """One training step: ``batches[rank][micro_step]`` for the local ranks; one result per local rank."""
        counts = {len(micro_batches) for micro_batches in batches}
        (micro_steps,) = counts
        self._require_micro_steps(micro_steps)
        watch: Watch | None = None
        if self._to_watch is not None and self._to_watch[0] == self.step_count + 1:
            watch = self._to_watch[1]
        with self._streams.entered():
            return self._step(batches, micro_steps, watch)

    def _step(
        self, batches: Sequence[Sequence[Batch]], micro_steps: int, watch: Watch | None
    ) -> list[RankResult]:
        for index in range(micro_steps):
            is_last = index == micro_steps - 1
            self._set_inputs([micro_batches[index] for micro_batches in batches], index)
            self._run(LAST_MICRO_STEP if is_last else MICRO_STEP, watch)
        # The update may reduce the loss over ranks, or clear it for the next step.
        losses = self._losses(micro_steps)
        scales = [self._loss_scale(memory) for memory in self.local_ranks.memories]
        self._run(UPDATE, watch)
        self.step_count += 1
        return [
            self._result(memory, loss, scale)
            for memory, loss, scale in zip(self.local_ranks.memories, losses, scales, strict=True)
        ]

    def evaluate(self, batches: Sequence[Batch]) -> list[RankEvaluation]:
        """Evaluate one batch per local rank by the program's ``evaluate`` section, which changes no state.

        Raises:
            UserError: where the program has no such section, or a batch does not fit.
        """
        if EVALUATE not in self._program.section_by_name or self._program.eval_loss is None:
            raise UserError(why_not_evaluate(self._program))
        with self._streams.entered():
            self._set_inputs(batches, 0)
            self._run(EVALUATE)
            return [self._evaluation(memory) for memory in self.local_ranks.memories]

    def _evaluation(self, memory: RankMemory) -> RankEvaluation:
        program = self._program
        assert program.eval_loss is not None
        values = [
            (output.path, memory.buffer(output.buffer).clone().view(output.shape))
            for output in program.outputs
        ]
        return RankEvaluation(
            loss=memory.buffer(program.eval_loss)[0].clone(), outputs=structured(values)
        )

    def watch(self, step: int, watch: Watch) -> None:
        """Observe every op of that step alone, counting from 1. Ops stay bound to each ``watch`` that was given."""
        self._to_watch = step, watch

    def entered(self) -> AbstractContextManager[None]:
        """A body between steps, on the compute stream; see ``Streams.entered``."""
        return self._streams.entered()

    def finish(self) -> None:
        """Return when the host's streams have done all tasks; the device may still be working."""
        self._streams.join([])

    def close(self) -> None:
        """Stop the streams."""
        self._streams.close()

    def _run(self, name: str, watch: Watch | None = None) -> None:
        section = self._program.section_by_name.get(name)
        if section is None:
            raise UserError(
                f"The program has no {name} section; compile it for this many micro-steps."
            )
        with torch.no_grad():
            if not self._is_begun:
                self._begin(section)
            self._streams.join([pending.event for pending in section.entry.pending])
            # Only ops that are issued one by one can be observed.
            if self._run_section is None or watch is not None:
                self._issue(section, watch)
            else:
                self._run_section(section, partial(self._issue, section, None))
            self._streams.join([pending.event for pending in section.exit.pending])

    def _issue(self, section: Section, watch: Watch | None) -> None:
        if watch is None and torch.autograd.profiler._is_profiler_enabled:
            watch = self._named
        # Bound ops are kept, observed ones too: otherwise a recorded step would run ops for the first time.
        tasks = self._bound.get((section.name, watch))
        if tasks is None:
            tasks = self._bound[section.name, watch] = self._bind(section, watch)
        for task in tasks:
            task()

    def _bind(self, section: Section, watch: Watch | None) -> list[Task]:
        runs = self._prepared.get(section.name)
        if runs is None:
            runs = [self._task(position, op) for position, op in section.positioned_ops()]
            self._prepared[section.name] = runs
        return [
            self._streams.bind(op, run, None if watch is None else partial(watch, position, op))
            for (position, op), run in zip(section.positioned_ops(), runs, strict=True)
        ]

    def _begin(self, section: Section) -> None:
        """Establish the entry state of the first section; later sections find theirs as their predecessors leave it."""
        self._is_begun = True
        state.establish(
            self._program, self.local_ranks.memories, self.local_ranks.comm, section.entry
        )
        for pending in section.entry.pending:
            self._streams.signal(pending.event)

    def _task(self, position: OpPosition, op: ops.Op) -> Task:
        """The function that carries an op out, the same whether it is observed or not."""
        step = self.local_ranks.prepare(op)

        def run() -> None:
            try:
                step()
            except UserError:
                raise
            except Exception as error:
                raise self._explained(position, error) from error

        return run

    def _named(self, position: OpPosition, _: ops.Op, run: Task) -> Task:
        label = self._labels[position]

        def named() -> None:
            with record_function(label):
                run()

        return named

    def _explained(self, position: OpPosition, error: Exception) -> ZeroirError:
        """The error to raise for a failure in an op: it names the failure, the op and a remedy."""
        place = f"{self._labels[position]} of step {self.step_count + 1}"
        if isinstance(error, RuntimeError) and is_lost_connection(error):
            return LostPeersError(
                f"Rank {self.local_ranks.memories[0].rank} lost its peers in {place}: another rank stopped or is "
                "stuck; look at the first rank that failed."
            )
        if is_out_of_memory(error):
            return UserError(f"Memory ran out in {place}: {MEMORY_REMEDY}.")
        if isinstance(error, IndexError):
            return UserError(f"The batch does not suit the model: {error}, in {place}.")
        return InternalError(f"{place}: {error}")

    @cached_property
    def _labels(self) -> Mapping[OpPosition, str]:
        """A label for each op, for profiles and errors."""
        return labels(self._program)

    def _set_inputs(self, batches: Sequence[Batch], micro_step: int) -> None:
        for memory, batch in zip(self.local_ranks.memories, batches, strict=True):
            write_inputs(self._program, memory, batch)
            for name in self._rng_buffers:
                sites = memory.buffer(name)
                seeds = [
                    site_seed(self.seed, self.step_count, micro_step, memory.rank, site)
                    for site in range(sites.numel())
                ]
                sites.copy_(torch.tensor(seeds, dtype=sites.dtype))

    def _require_micro_steps(self, micro_steps: int) -> None:
        compiled = int(self._program.option.get("micro_steps", micro_steps))
        if micro_steps != compiled:
            raise UserError(
                f"A step of this program takes {compiled} micro-batches, but got {micro_steps}; "
                "pass a list of as many batches, or compile with another --micro-steps."
            )

    @property
    def _loss_name(self) -> str:
        if self._program.loss is None:
            raise UserError("The program names no loss; compile it again.")
        return self._program.loss

    def _losses(self, micro_steps: int) -> list[Tensor]:
        name = self._loss_name
        return [
            memory.buffer(name)[0].clone() / micro_steps for memory in self.local_ranks.memories
        ]

    def _loss_scale(self, memory: RankMemory) -> Tensor | None:
        """A copy of this step's loss scale, because the update may change it."""
        decide = self._decision
        if decide is None or decide.loss_scale is None:
            return None
        return memory.region(decide.loss_scale)[0].clone()

    def _result(self, memory: RankMemory, loss: Tensor, scale: Tensor | None) -> RankResult:
        decide = self._decision
        mean_loss = None
        if self._is_loss_reduced and self._program.loss is not None:
            mean_loss = memory.buffer(self._program.loss)[0] / self._program.mesh.world_size
        if decide is None:
            return RankResult(loss=loss, mean_loss=mean_loss, is_skipped=None, grad_norm=None)
        skip, norm = decide.skip, None
        if decide.norm is not None:
            divisor = decide.divisor if scale is None else decide.divisor * scale
            norm = memory.region(decide.norm)[0].sqrt() / divisor
        return RankResult(
            loss=loss,
            mean_loss=mean_loss,
            is_skipped=None if skip is None else memory.region(skip)[0].clone(),
            grad_norm=norm,
        )

    @cached_property
    def _is_loss_reduced(self) -> bool:
        """Whether the update leaves the sum over all ranks, along every axis of the mesh, in the loss buffer."""
        section = self._program.section_by_name.get(UPDATE)
        summed: set[str] = set()
        for op in () if section is None else section.body:
            match op:
                case ops.AllReduce():
                    if any(p.destination.buffer == self._program.loss for p in op.pairs):
                        summed.add(self._program.comm_by_name[op.comm].axis)
                case ops.Fill() if op.destination.buffer == self._program.loss:
                    summed.clear()
                case _:
                    pass
        axes = {axis.name for axis in self._program.mesh.axes if axis.size > 1}
        return bool(summed) and axes <= summed

    @cached_property
    def _decision(self) -> ops.Decide | None:
        return next((op for op in self._program.ops() if isinstance(op, ops.Decide)), None)
