"""The passes and the verification of an artefact's logical program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from zeroir.api import kept_programs
from zeroir.artifact import Artifact
from zeroir.config import options_of, replaced
from zeroir.ir.program import Program
from zeroir.verify import Report
from zeroir.verify import verify as verify_program

if TYPE_CHECKING:
    from zeroir.api.search.speculation import SpeculationChoice
    from zeroir.cost.machine import Machine
    from zeroir.passes.manager import Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A scheduled program with its proof, and the choice about speculation."""

    proof: Proof
    speculation: SpeculationChoice | None


def lower(
    logical: Program,
    machine: Machine | None = None,
    *,
    is_kept: bool = False,
) -> Lowered:
    """Lower a program with its options, after choosing what they leave open: ``--offload adaptive``, and speculation.

    A program that ``is_kept`` is found on disk if it was lowered before, and else kept there.
    """
    from zeroir.api.search.adaptive import settled
    from zeroir.api.search.speculation import choose
    from zeroir.passes.manager import prove
    from zeroir.passes.pipelines import for_options

    options = settled(logical, options_of(logical), machine)
    speculation = choose(logical, options, machine)
    if speculation is not None:
        options = replaced(options, speculate=speculation.speculates)
    program, passes = replace(logical, options=options), for_options(options)
    make = partial(prove, program, passes)
    proof = kept_programs.proved(program, passes, make) if is_kept else make()
    return Lowered(proof=proof, speculation=speculation)


def verified(
    artifact: Artifact,
    budget_bytes: int | None = None,
    machine: Machine | None = None,
) -> tuple[Artifact, Report]:
    """Verify the scheduled program of an artefact with a budget of device memory.

    Workspaces that were measured on ``machine`` replace the declared ones. The default budget is the program's own.
    """
    if machine is not None:
        from zeroir.cost.measured_workspaces import with_measured_workspaces

        scheduled = with_measured_workspaces(artifact.scheduled, machine)
        artifact = replace(artifact, scheduled=scheduled)
    options = options_of(artifact.scheduled)
    if budget_bytes is None:
        budget_bytes = options.offload.memory_budget_bytes
    report = verify_program(
        artifact.scheduled, reference=artifact.logical, budget_bytes=budget_bytes
    )
    if budget_bytes is not None and any(f.code == "Z301" for f in report.findings):
        from zeroir.api.search.budget import advice

        remedy = advice(artifact.logical, options, budget_bytes, machine)
        findings = (replace(f, advice=remedy) if f.code == "Z301" else f for f in report.findings)
        report = replace(report, findings=tuple(findings))
    return artifact, report
