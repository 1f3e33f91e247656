"""A step that ``zeroir run --trace`` measured, read from its trace and matched with the ops of the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from zeroir.artifact.schema import program_digest
from zeroir.cost.tasks import step_sections
from zeroir.errors import UserError
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, OpPosition, Program
from zeroir.ir.spans import Span
from zeroir.report.names import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured training step.

    ``ranks[r][i]`` is the span of op number ``i`` of the step on rank ``r``, in program order; None if the rank did not
    execute the op, such as the rest of an update that was skipped. Times are nanoseconds since the first op of any
    rank.
    """

    step: int
    micro_steps: int
    ranks: tuple[tuple[Span | None, ...], ...]

    @property
    def step_ns(self) -> int:
        """Nanoseconds from the first to the last op of all ranks."""
        return max((span.end_ns for spans in self.ranks for span in spans if span), default=0)

    def durations_ns(self, number: int) -> list[int]:
        """Return the durations of op ``number`` on the ranks that executed it."""
        spans = (of_rank[number] for of_rank in self.ranks)
        return [span.duration_ns for span in spans if span is not None]


class _Facts(BaseModel):
    """The facts of a trace that ``zeroir.report.trace`` writes; a simulated one has a machine and no step."""

    program: str
    ranks: int = Field(ge=1)
    step: int = 1
    machine: str | None = None


class _OpIndex(BaseModel):
    section: str
    index: int


class _TracedOpEvent(BaseModel):
    ph: Literal["X"]
    ts: float
    dur: float = Field(ge=0)
    pid: int = Field(ge=0)
    args: _OpIndex


class _OtherEvent(BaseModel):
    ph: Literal["M", "s", "f"]


class _Trace(BaseModel):
    events: list[_TracedOpEvent | _OtherEvent] = Field(alias="traceEvents")
    facts: _Facts = Field(alias="otherData")


def read_measured_step(path: Path, program: Program) -> MeasuredStep:
    """Read a step of ``program`` from a file that ``zeroir run --trace`` wrote.

    Raises:
        UserError: if the file cannot be read, is not such a trace, has a simulated step, or is of another program.
    """
    trace = _decoded(path)
    facts = trace.facts
    if facts.machine is not None:
        raise UserError(
            f"'{path}' holds a step simulated on {facts.machine}; --trace takes a measured one, which "
            "`zeroir run --trace` writes."
        )
    if facts.ranks != program.mesh.world_size:
        raise UserError(
            f"'{path}' is a trace of {counted(facts.ranks, 'rank')}, but the program is for "
            f"{program.mesh.world_size}: compile it with --world-size {facts.ranks}, and trace that program."
        )
    digest = program_digest(program)
    if facts.program != digest:
        raise UserError(
            f"'{path}' is a trace of another program (digest {facts.program[:12]}, and not {digest[:12]}): give the "
            "program that ran, or trace this one with `zeroir run --trace`."
        )
    spans_by_rank: list[dict[OpPosition, list[Span]]] = [{} for _ in range(facts.ranks)]
    for event in trace.events:
        if isinstance(event, _TracedOpEvent):
            start_ns = round(event.ts * 1000)
            span = Span(
                event.args.section, event.args.index, start_ns, start_ns + round(event.dur * 1000)
            )
            if event.pid >= facts.ranks:
                raise _no_trace(path)
            spans_by_rank[event.pid].setdefault(span.position, []).append(span)
    return _in_program_order(path, program, facts.step, spans_by_rank)


def _in_program_order(
    path: Path, program: Program, step: int, spans_by_rank: Sequence[dict[OpPosition, list[Span]]]
) -> MeasuredStep:
    """Return each rank's spans by the number of their op in the step; those of other sections are left out."""
    most_runs = max(
        (
            len(spans)
            for by_position in spans_by_rank
            for position, spans in by_position.items()
            if position.section == MICRO_STEP
        ),
        default=0,
    )
    is_stepping = any(
        position.section == LAST_MICRO_STEP for of_rank in spans_by_rank for position in of_rank
    )
    if not is_stepping:
        raise _no_trace(path)
    micro_steps = (most_runs + 1) * program.interleaved
    positions = [
        position
        for section in step_sections(program, micro_steps)
        for position, _ in section.positioned_ops()
    ]
    ranks = []
    for by_position in spans_by_rank:
        for spans in by_position.values():
            spans.sort(key=lambda span: span.start_ns)
        runs: Counter[OpPosition] = Counter()
        ordered: list[Span | None] = []
        for position in positions:
            spans = by_position.get(position, [])
            ordered.append(spans[runs[position]] if runs[position] < len(spans) else None)
            runs[position] += 1
        ranks.append(tuple(ordered))
    return MeasuredStep(step=step, micro_steps=micro_steps, ranks=tuple(ranks))


def _decoded(path: Path) -> _Trace:
    try:
        return _Trace.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"The trace '{path}' cannot be read: {error.strerror}.") from None
    except ValidationError:
        raise _no_trace(path) from None


def _no_trace(path: Path) -> UserError:
    return UserError(f"'{path}' is no trace of a step, as `zeroir run --trace` writes it.")
