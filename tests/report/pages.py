"""Pages of small programs, for tests."""

from __future__ import annotations

from functools import cache

from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.cost.machine import load_machine
from zeroir.cost.simulate import Simulation, simulate
from zeroir.ir.program import Program
from zeroir.passes.pipelines import for_options
from zeroir.report.page.html import report_html
from zeroir.report.page.sides import ReportedProgram
from zeroir.report.summary import summarise
from zeroir.verify import verify

BUDGET_BYTES = 40_000


@cache
def program(micro_steps: int = 1, stage: int = 3) -> Program:
    """A perceptron of three blocks on four ranks."""
    options = make_options({"stage": stage, "world_size": 4, "micro_steps": micro_steps})
    return applied(mlp(blocks=3, dim=32, micro_steps=micro_steps), for_options(options))


@cache
def simulated(made: Program) -> Simulation:
    """A step of a program on a machine of eight GPUs."""
    return simulate(made, load_machine("dgx-h100"))


@cache
def reported(
    made: Program, name: str = "mlp.zir", budget_bytes: int | None = BUDGET_BYTES
) -> ReportedProgram:
    """A program as a page shows it."""
    report = verify(made)
    return ReportedProgram(
        name=name,
        program=made,
        report=report,
        summary=summarise(
            made, report, stage=int(made.options.texts.get("stage", "3")), precision="fp32"
        ),
        simulation=simulated(made),
        budget_bytes=budget_bytes,
    )


def page_of(made: Program, name: str = "mlp.zir") -> str:
    """The page of a program."""
    return report_html(reported(made, name))
