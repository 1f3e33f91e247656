"""Choices of options for one logical program: each is lowered and measured, and simulated if a machine is known.

Both the search for the fastest options and that for options within a budget use them. Nothing is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from zeroir.config import CompileOptions, make_options, replaced
from zeroir.config.communication import EARLY
from zeroir.config.offload_places import HOST, KEPT_ON_DISK
from zeroir.config.searched import Value
from zeroir.cost.bounds import compute_bound_s, wire_bound_s
from zeroir.cost.machine import Machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.cost.search import SearchOutcome
from zeroir.cost.simulate import Measured, Simulation, simulate
from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.analysis.instances import instance, values_of_dims
from zeroir.ir.buffers import Role, Space
from zeroir.ir.limits import MOST_BYTES
from zeroir.ir.program import Program
from zeroir.memory.footprint import FullestMoment, footprint
from zeroir.memory.placement import unplaced
from zeroir.memory.states import snapshot_bytes
from zeroir.passes.base import Fact, Pass
from zeroir.passes.common.order import derive_waits
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.pipelines import for_options
from zeroir.report.costs import path_shares
from zeroir.workspace.segments import corrected

_KEPT_PROGRAMS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice that was tried: its memory on a rank's device, and the time of its step if it fits.

    Of ``needed_bytes``, ``resting_bytes`` are persistent. ``culprit`` names the place with the most live bytes. The
    buffers of a choice that does not fit are not placed: ``needed_bytes`` is then a lower bound. ``bounded_by`` are the
    parts of the critical path, largest first, as fractions of the step. ``measured`` counts the segments and
    collectives with measurements on the machine; the times of the others are computed. Without a machine no step is
    simulated.

    ``host_bytes`` of a rank are in the memory of its host, without snapshots for checkpoints; for
    ``missing_host_bytes`` of them the machine's hosts have no room.
    """

    settings: Mapping[str, Value]
    needed_bytes: int
    resting_bytes: int
    culprit: str
    step_ns: int | None = None
    exposed_ns: int = 0
    bounded_by: tuple[tuple[str, float], ...] = ()
    measured: Measured | None = None
    host_bytes: int = 0
    missing_host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProgram:
    """A program, its simulated step, and the bytes of a rank that do not fit in the machine's host memory."""

    program: Program
    simulation: Simulation
    missing_host_bytes: int


class CandidateMeasurer:
    """Lowers a logical program with settings that differ from given options; common passes run once.

    The workspaces that were measured on the ``machine`` are used. Memory is that of the largest batches, and steps are
    simulated for batches in which dims have the values ``at``, by default the largest.
    """

    def __init__(
        self,
        logical: Program,
        options: CompileOptions,
        budget_bytes: int,
        machine: Machine | None,
        at: Mapping[str, int] = {},
    ) -> None:
        self._logical = logical
        self._at = values_of_dims(logical, at)
        self._base = replaced(options, memory_budget=str(budget_bytes))
        self._budget_bytes = budget_bytes
        self._machine = machine
        self._after = lru_cache(maxsize=_KEPT_PROGRAMS)(self._run_passes)
        self._compute_ns: dict[tuple[Pass, ...], int] = {}

    @property
    def has_dims(self) -> bool:
        """Whether batches have several sizes."""
        return bool(self._logical.dims)

    def options(self, settings: Mapping[str, Value]) -> CompileOptions:
        """Return the options of a choice."""
        values = {**self._base.flat, **settings}
        if settings.get("prefetch") == EARLY:
            # Only the budget then determines how early.
            del values["prefetch"]
            values["prefetch_budget"] = self._base.offload.memory_budget
        offloaded = settings.get("offload")
        if isinstance(offloaded, tuple) and set(offloaded).isdisjoint(KEPT_ON_DISK):
            values["offload_to"] = HOST
        return make_options(values)

    def simulated(self, settings: Mapping[str, Value]) -> SimulatedProgram:
        """Simulate the step of a program with these settings, without measuring its device memory.

        Raises:
            InternalError: if no machine is known.
        """
        if self._machine is None:
            raise InternalError("A step is to be simulated, but on no machine.")
        program = derive_waits(corrected(self._lowered(settings)))
        return SimulatedProgram(
            program=program,
            simulation=simulate(instance(program, self._at), self._machine),
            missing_host_bytes=max(0, _host_bytes(program) - self._most_host_bytes(program)),
        )

    def measure(self, settings: Mapping[str, Value]) -> tuple[Candidate, SearchOutcome]:
        """Measure settings; the needed memory is exact if it fits the budget, otherwise a lower bound.

        If they leave open whether the host's update is speculative, and a machine is known, the faster step counts.
        """
        if self._machine is None or not self.options(settings).may_speculate:
            return self._measured(settings)
        waiting, speculating = (
            self._measured({**settings, "speculate": speculates}) for speculates in (False, True)
        )
        (candidate, outcome), (other, other_outcome) = waiting, speculating
        is_better = other_outcome.missing_bytes == 0 and other_outcome.step_ns < outcome.step_ns
        chosen, outcome = (other, other_outcome) if is_better else (candidate, outcome)
        # Lowering these settings for this machine leads to the same choice.
        return replace(chosen, settings=settings), outcome

    def _measured(self, settings: Mapping[str, Value]) -> tuple[Candidate, SearchOutcome]:
        program = derive_waits(corrected(self._lowered(settings)))
        measured = program
        if self._machine is not None:
            measured = with_measured_workspaces(program, self._machine)
        needed = footprint(measured, place=unplaced)
        if needed.total_bytes <= self._budget_bytes:
            # Places are searched only for what may fit.
            needed = footprint(measured)
        host_bytes = _host_bytes(program)
        missing_host_bytes = max(0, host_bytes - self._most_host_bytes(program))
        candidate = Candidate(
            settings=settings,
            needed_bytes=needed.total_bytes,
            resting_bytes=needed.resting_bytes,
            culprit=_culprit(program, needed.fullest),
            host_bytes=host_bytes,
            missing_host_bytes=missing_host_bytes,
        )
        evaluation = SearchOutcome(
            missing_bytes=max(0, needed.total_bytes - self._budget_bytes) + missing_host_bytes,
            needed_bytes=needed.total_bytes,
            is_hopeless=needed.resting_bytes > self._budget_bytes,
        )
        if self._machine is None:
            return candidate, evaluation
        simulation = simulate(instance(program, self._at), self._machine)
        evaluation = replace(evaluation, step_ns=simulation.step_ns)
        candidate = replace(candidate, measured=simulation.measured)
        if evaluation.fits:
            candidate = replace(
                candidate,
                step_ns=simulation.step_ns,
                exposed_ns=round(simulation.exposed_s * 1e9),
                bounded_by=_bounds(program, simulation),
            )
        return candidate, evaluation

    def _most_host_bytes(self, program: Program) -> int:
        """Return a rank's share of its host's memory; no limit if the host's memory is the device's."""
        if self._machine is None or self._machine.host.computes:
            return MOST_BYTES
        ranks = self._machine.sharing_ranks(program.mesh.world_size)
        return int(self._machine.host.memory.size_bytes.value / ranks)

    def compute_bound_ns(self, settings: Mapping[str, Value], machine: Machine) -> int:
        """Return a lower bound of the time of the segments, which depends only on the saved and recomputed values."""
        passes = for_options(self.options(settings))
        local = passes[: _first_reduction(passes)]
        if local not in self._compute_ns:
            program = replace(self._after(local), options=self._base)
            program = instance(program, self._at)
            self._compute_ns[local] = int(compute_bound_s(program, machine) * 1e9)
        return self._compute_ns[local]

    def wire_bound_ns(self, settings: Mapping[str, Value], machine: Machine) -> int:
        """Return a lower bound of the time of the collectives."""
        return int(wire_bound_s(self._lowered(settings), machine) * 1e9)

    def _lowered(self, settings: Mapping[str, Value]) -> Program:
        """Lower the program up to memory planning: without waits and without corrections of its segments' memory."""
        options = self.options(settings)
        passes = tuple(step for step in for_options(options) if not isinstance(step, PlanMemory))
        return replace(self._after(passes), options=options)

    def _run_passes(self, passes: tuple[Pass, ...]) -> Program:
        """Run these passes on the logical program without verifying it.

        No pass needs the waits derived after another.
        """
        if not passes:
            return self._logical
        before, last = self._after(passes[:-1]), passes[-1]
        return replace(last(before), passes=(*before.passes, last.spec()))


def _host_bytes(program: Program) -> int:
    """Return the bytes of a rank in the memory of its host, without snapshots."""
    elsewhere = {b.role for b in program.buffers if b.space is Space.HOST}
    if elsewhere <= {Role.SCALAR, Role.SNAPSHOT}:
        return 0
    needed = footprint(program, space=Space.HOST, place=unplaced)
    return needed.total_bytes - snapshot_bytes(program)


def _bounds(program: Program, simulation: Simulation) -> tuple[tuple[str, float], ...]:
    """Return the parts of the critical path of a step as fractions of it, largest first."""
    shares: dict[str, float] = {}
    for share in path_shares(program, simulation):
        what = "the segments" if share.what.startswith("compute ") else share.what
        shares[what] = shares.get(what, 0.0) + share.seconds / simulation.step_s
    return tuple(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _first_reduction(passes: Sequence[Pass]) -> int:
    """Return the number of passes before the first that depends on ranks."""
    for count, step in enumerate(passes):
        if Fact.GRADIENTS_REDUCED in step.establishes:
            return count
    return len(passes)


def _culprit(program: Program, fullest: FullestMoment) -> str:
    """Return the place at which a program has the most live bytes."""
    place = f"in {fullest.section}" if fullest.section else "of what rests there"
    if fullest.section and fullest.index >= 0:
        op = program.section_by_name[fullest.section].body[fullest.index]
        what = f" %{op.buffer}" if isinstance(op, ops.Alloc) else ""
        place = f"at `{ops.op_name(type(op))}{what}` ({fullest.section}:{fullest.index})"
    place += f" of unit {fullest.unit}" if fullest.unit else ""
    return place + (f" ({fullest.source})" if fullest.source else "")
