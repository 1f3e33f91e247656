"""Issues the ops of a program's sections, in order, each on its stream, for ``StepExecutor``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from torch.profiler import record_function

from zeroir.errors import (
    MEMORY_REMEDY,
    InternalError,
    UserError,
    ZeroirError,
    explain_device_assert,
    is_out_of_memory,
)
from zeroir.ir import ops
from zeroir.ir.analysis.labels import labels
from zeroir.ir.analysis.micro_batches import micro_batches_of_ops
from zeroir.ir.program import OpPosition, Section
from zeroir.runtime.comm.base import DifferentCollectivesError
from zeroir.runtime.comm.job import LostPeersError, is_lost_connection
from zeroir.runtime.distributed.section_comparison import SHOWN_S, SectionsOfRanks
from zeroir.runtime.execution.batch import Shape
from zeroir.runtime.execution.handlers import MOST_SHAPES, LocalRanks
from zeroir.runtime.execution.streams import Streams
from zeroir.runtime.execution.trace import Task, Watch
from zeroir.runtime.state import state

K = TypeVar("K")

ShapesOfRanks = Sequence[Sequence[Shape]]
"""The shapes of the micro-batches of a section, for each local rank; empty where the program has no dims."""


class _OpsOfMicroBatch(NamedTuple):
    """The ops of a section that have the dims of one micro-batch, or no dims, and its shape on each local rank."""

    section: str
    micro_batch: int | None
    shapes: tuple[Shape, ...]


RunSection = Callable[[Section, Callable[[], None]], None]
"""A function that runs a section, whose ops the given function submits."""


class SectionRunner:
    """Runs whole sections of a program for the local ranks.

    Ops are bound to their streams once, at the section's first run. ``run_section`` replaces this way of running them,
    for example with CUDA graphs, unless ops are observed. An error names the op that failed.
    """

    def __init__(
        self, local_ranks: LocalRanks, streams: Streams, run_section: RunSection | None
    ) -> None:
        self._local_ranks = local_ranks
        self._program = local_ranks.program
        self._streams = streams
        self._run_section = run_section
        self._is_begun = False
        self._has_failed = False
        self._position: OpPosition | None = None
        self._when: dict[str, str] = {}
        self._prepared: OrderedDict[_OpsOfMicroBatch, list[Task]] = OrderedDict()
        self._bound: OrderedDict[tuple[_OpsOfMicroBatch, Watch | None], list[Task]] = OrderedDict()
        self._owners_of_ops: dict[str, Sequence[int | None]] = {}
        self.sections: SectionsOfRanks | None = None
        """The record of the sections with collectives, which the ranks compare."""
        self._shared = {
            section.name
            for section in self._program.sections
            if any(isinstance(op, ops.CollectiveOp) for op in section.body)
        }
        self._pending = {
            section.name: (
                [pending.event for pending in section.entry.pending],
                [pending.event for pending in section.exit.pending],
            )
            for section in self._program.sections
        }

    @property
    def position(self) -> OpPosition | None:
        """The op that started last; None outside sections. Any thread may read it."""
        return self._position

    @property
    def has_failed(self) -> bool:
        """Whether a section or a change of values started and did not finish."""
        return self._has_failed

    def run(
        self, name: str, when: str, watch: Watch | None = None, shapes: ShapesOfRanks = ()
    ) -> None:
        """Run a section, observed by ``watch`` if that is given; errors mention ``when``, such as ``of step 3``.

        Raises:
            UserError: where the program has no such section, an earlier one failed, memory runs out or a batch does
                not suit the model.
            LostPeersError: where another rank is lost.
            InternalError: where an op fails for any other reason.
        """
        section = self._program.section_by_name.get(name)
        if section is None:
            raise UserError(
                f"The program has no {name} section; compile it for this many micro-steps."
            )
        self.require_intact()
        self._when[name] = when
        self._has_failed = True  # until the section has finished
        with torch.no_grad():
            if not self._is_begun:
                self._begin(section)
            entering, leaving = self._pending[name]
            self._streams.join(entering)
            # Only ops that are issued one by one can be observed.
            if self._run_section is None or watch is not None:
                self._issue(section, watch, shapes)
            else:
                self._run_section(section, partial(self._issue, section, None, shapes))
            self._streams.join(leaving)
        self._has_failed = False
        self._position = None

    def require_intact(self) -> None:
        """Raise UserError where an earlier section started and did not finish."""
        if self._has_failed:
            raise UserError(
                "An earlier step failed in its middle, and left a part of the values changed: make a new engine."
            )

    def approach(self, name: str, step: int, micro_steps: int) -> None:
        """Set the position to the first op of the section that runs next.

        ``step`` counts from 1; ``micro_steps`` of it are done when the section ends.
        """
        section = self._program.section_by_name.get(name)
        ops_in_order = () if section is None else section.positioned_ops()
        self._position = next((position for position, _ in ops_in_order), None)
        if self.sections is not None and name in self._shared:
            self.sections.begin(name, step, micro_steps)

    def establish(self, name: str) -> None:
        """Restore the entry state of the next section from the values of the persistent buffers."""
        with torch.no_grad():
            self._begin(self._program.section_by_name[name])

    def restart(self) -> None:
        """Restore the entry state of the next section that runs, as before the first one."""
        self._is_begun = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run a block that changes the values of buffers; if it fails, no section may run afterwards."""
        self._has_failed = True
        yield
        self._has_failed = False

    @cached_property
    def labels(self) -> Mapping[OpPosition, str]:
        """A label for each op, for profiles and errors."""
        return labels(self._program)

    def _begin(self, section: Section) -> None:
        """Establish the entry state of the first section.

        Each later section starts from the exit state of the previous one.
        """
        self._is_begun = True
        state.establish(
            self._program, self._local_ranks.memories, self._local_ranks.comm, section.entry
        )
        for pending in section.entry.pending:
            self._streams.signal(pending.event)

    def _issue(self, section: Section, watch: Watch | None, shapes: ShapesOfRanks) -> None:
        if watch is None and torch.autograd.profiler._is_profiler_enabled:
            watch = self._named
        # The ops of a micro-batch are bound to its shape, whatever shapes the others have that run with it.
        owners = self._owners(section, has_dims=bool(shapes))
        following: dict[int | None, Iterator[Task]] = {}
        for owner in dict.fromkeys(owners):
            own = () if owner is None else tuple(of_rank[owner] for of_rank in shapes)
            following[owner] = iter(
                self._bind(section, _OpsOfMicroBatch(section.name, owner, own), watch)
            )
        for owner in owners:
            next(following[owner])()

    def _owners(self, section: Section, *, has_dims: bool) -> Sequence[int | None]:
        """Return the micro-batch of whose shape each op is, None where it has no size that depends on a dim."""
        owners = self._owners_of_ops.get(section.name)
        if owners is None:
            owners = [0 if has_dims else None] * len(section.body)
            if has_dims and self._program.interleaved > 1:
                of_ops = micro_batches_of_ops(self._program, section)
                owners = [min(of_op) if len(of_op) == 1 else None for of_op in of_ops]
            self._owners_of_ops[section.name] = owners
        return owners

    def _bind(self, section: Section, part: _OpsOfMicroBatch, watch: Watch | None) -> list[Task]:
        """Return the tasks of the ops of a part, which are kept for recent shapes."""
        # Bound ops are kept, observed ones too: otherwise a recorded step would run ops for the first time.
        key = part, watch
        tasks = self._bound.get(key)
        if tasks is None:
            owners = self._owners_of_ops[section.name]
            own = [
                op
                for owner, op in zip(owners, section.positioned_ops(), strict=True)
                if owner == part.micro_batch
            ]
            runs = self._prepared.get(part)
            if runs is None:
                runs = [self._task(position, op, part.shapes) for position, op in own]
                self._prepared[part] = runs
            tasks = self._bound[key] = [
                self._streams.bind(op, run, None if watch is None else partial(watch, position, op))
                for (position, op), run in zip(own, runs, strict=True)
            ]
        if part.shapes:
            most = MOST_SHAPES * self._program.interleaved
            _keep_recent(self._prepared, part, most)
            _keep_recent(self._bound, key, most)
        return tasks

    def _task(self, position: OpPosition, op: ops.Op, shapes: tuple[Shape, ...]) -> Task:
        """Return the function that runs an op, observed or not."""
        ranks = [self._local_ranks.at(shape) for shape in shapes]
        by_rank = [
            (at, at.program.section_by_name[position.section].body[position.index]) for at in ranks
        ]
        step = self._local_ranks.prepare(op, by_rank)

        def run() -> None:
            self._position = position
            try:
                step()
            except UserError:
                raise
            except Exception as error:
                raise self._explained(position, error) from error

        return run

    def _named(self, position: OpPosition, _: ops.Op, run: Task) -> Task:
        label = self.labels[position]

        def named() -> None:
            with record_function(label):
                run()

        return named

    def _different(self, error: Exception) -> UserError | None:
        """Return the error that the ranks run different things, if that caused this error."""
        if self.sections is None:
            return None
        match error:
            case DifferentCollectivesError():
                return self.sections.error(patience_s=SHOWN_S)
            case RuntimeError() if is_lost_connection(error):
                return self.sections.error(patience_s=1.0)
            case _:
                return None

    def _explained(self, position: OpPosition, error: Exception) -> ZeroirError:
        """Return the error to raise for a failed op, which names the failure, the op and a remedy."""
        place = f"{self.labels[position]} {self._when[position.section]}"
        if (different := self._different(error)) is not None:
            return different
        if isinstance(error, RuntimeError) and is_lost_connection(error):
            return LostPeersError(
                f"Rank {self._local_ranks.memories[0].rank} lost its peers in {place}: another rank stopped or is "
                "stuck; look at the first rank that failed."
            )
        if is_out_of_memory(error):
            return UserError(f"Memory ran out in {place}: {MEMORY_REMEDY}.")
        if (refusal := explain_device_assert(error, f"in {place}")) is not None:
            return UserError(refusal)
        if isinstance(error, IndexError):
            problem = str(error).rstrip(".")
            return UserError(f"The batch does not suit the model: {problem}, in {place}.")
        return InternalError(f"{place}: {error}")


def _keep_recent(kept: OrderedDict[K, list[Task]], key: K, most: int) -> None:
    """Note the use of an entry where it is kept, and drop the one whose use is longest ago where there are too many."""
    if key in kept:
        kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
