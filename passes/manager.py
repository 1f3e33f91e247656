"""Runs passes one after another; checks their contracts before and the program after each of them.

The checks cannot be disabled: a pass that breaks a program is a defect of zeroir, and is reported as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zeroir.errors import InternalError, UserError
from zeroir.ir.program import Program
from zeroir.memory.placement import unplanned
from zeroir.passes.base import LOGICAL_FACTS, Fact, Pass, listed, split_spec
from zeroir.passes.catalogue import PASSES, parse_spec
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.verify import Reference, Report, VerificationError, verify, verify_at_largest
from zeroir.workspace.segments import corrected

Verifier = Callable[[Program, Reference | None], Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A program, and the report that it breaks no law."""

    program: Program
    report: Report


def run(program: Program, passes: Sequence[Pass], reference: Program | None = None) -> Program:
    """Return the program after all passes, as ``steps`` yields it."""
    return prove(program, passes, reference).program


def prove(program: Program, passes: Sequence[Pass], reference: Program | None = None) -> Proof:
    """Return the program after all passes, as ``steps`` yields it, with the report on that program."""
    try:
        *_, (_, last) = _proofs(program, passes, reference, verify_at_largest)
    except InternalError:
        if not program.dims:
            raise
        # The pass that broke it at the smallest dims may be an earlier one.
        *_, (_, last) = _proofs(program, passes, reference, verify)
    return last


def steps(
    program: Program, passes: Sequence[Pass], reference: Program | None = None
) -> Iterator[tuple[Pass, Program]]:
    """Yield each pass with the program after it, verified against ``reference``, the logical program.

    Without a reference, a program on which no pass has run is its own reference.

    Raises:
        UserError: before anything runs, where a pass lacks what it requires or would repeat another, or where the
            program is invalid already (a VerificationError).
        InternalError: if a pass fails or breaks the program; the message names it.
    """
    for step, proof in _proofs(program, passes, reference, verify):
        if step is not None:
            yield step, proof.program


def apply(step: Pass, program: Program) -> Program:
    """Return the program after a pass, which is appended to its list of passes; it is not verified."""
    # Waits and a memory plan belong to the previous ops and buffers.
    after = step(without_waits(unplanned(program)))
    # A pass may bind the outputs of a segment differently, which changes what a kernel must hold itself.
    return replace(derive_waits(corrected(after)), passes=(*program.passes, step.spec()))


def _proofs(
    program: Program, passes: Sequence[Pass], reference: Program | None, between: Verifier
) -> Iterator[tuple[Pass | None, Proof]]:
    """Yield the given program, and the program after each pass; ``between`` verifies all but the first and the last."""
    check_contracts(program, passes)
    if reference is None and not program.passes:
        reference = program
    logical = None if reference is None else Reference(reference)
    proof = _proved(program, logical, verify)
    yield None, proof
    for number, step in enumerate(passes, 1):
        verifier = verify if number == len(passes) else between
        proof = _apply(step, proof.program, logical, verifier)
        yield step, proof


def _apply(step: Pass, program: Program, reference: Reference | None, verifier: Verifier) -> Proof:
    try:
        after = apply(step, program)
    except UserError:
        raise
    except Exception as error:
        message = f"The pass `{step.spec()}` failed: {type(error).__name__}: {error}"
        raise InternalError(message) from error
    lost = {bound.kind for bound in program.bounds} - {bound.kind for bound in after.bounds}
    if lost:
        raise InternalError(f"The pass `{step.spec()}` lost the bound on {listed(sorted(lost))}.")
    try:
        return _proved(after, reference, verifier)
    except UserError as error:
        raise InternalError(f"The pass `{step.spec()}` broke the program. {error}") from error


def _proved(program: Program, reference: Reference | None, verifier: Verifier) -> Proof:
    report = verifier(program, reference)
    if not report.is_valid:
        raise VerificationError(report)
    return Proof(program=program, report=report)


def check_contracts(program: Program, passes: Sequence[Pass]) -> None:
    """Raise a UserError if the passes do not follow from one another and from those that have already run."""
    holding: set[Fact] = set(LOGICAL_FACTS)
    establishers: dict[Fact, str] = {}
    destroyers: dict[Fact, str] = {}
    ran: list[str] = []
    for number, step in enumerate((*map(parse_spec, program.passes), *passes)):
        spec = step.spec()
        if number >= len(program.passes):
            for fact in sorted(step.requires - holding):
                raise UserError(_lacking(step, fact, destroyers.get(fact), ran))
            for fact in sorted(step.establishes & establishers.keys()):
                raise UserError(
                    f"The pass `{spec}` would establish {fact} a second time: "
                    f"`{establishers[fact]}` has done so; leave one of them out."
                )
        holding = (holding | step.establishes) - step.destroys
        establishers |= dict.fromkeys(step.establishes, spec)
        destroyers |= dict.fromkeys(step.destroys, spec)
        ran.append(spec)


def _lacking(step: Pass, fact: Fact, destroyer: str | None, ran: Sequence[str]) -> str:
    """Return why a fact that a pass requires does not hold, and what to do."""
    begin = f"The pass `{step.spec()}` requires {fact}, which"
    if destroyer is not None:
        if split_spec(destroyer)[0] == step.name:
            return f"{begin} `{destroyer}` has ended; leave one of them out."
        return f"{begin} `{destroyer}` has ended; put `{step.name}` before it."
    sources = listed(f"`{kind.name}`" for kind in PASSES if fact in kind.establishes)
    so_far = f"only {listed(f'`{spec}`' for spec in ran)}" if ran else "no pass"
    return (
        f"{begin} {sources} establishes, but {so_far} ran before it; "
        f"put {sources} before `{step.name}`."
    )
