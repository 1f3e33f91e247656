"""The command that writes a page for a browser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import (
    DEFAULT_MACHINE,
    AsJson,
    At,
    Machine,
    ProgramFile,
    SizesHistogram,
)
from zeroir.cli.console import out, print_json
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.api import CompiledProgram
    from zeroir.cost.machine import Machine as DescribedMachine
    from zeroir.report.page.sides import ReportedProgram


def report(
    program: ProgramFile,
    other: Annotated[
        Path | None, Parameter(help="A second program, to be shown side by side with the first.")
    ] = None,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["-o", "--output"],
            help="The page to write. [default: PROGRAM.html or PROGRAM-OTHER.html in the current folder]",
        ),
    ] = None,
    machine: Machine = DEFAULT_MACHINE,
    at: At = None,
    histogram: SizesHistogram = None,
    memory_budget: Annotated[
        str | None,
        Parameter(
            name=["--memory-budget", "--budget"],
            help="Device memory of a rank, such as 80GB, shown as a line. [default: the program's, else the machine's]",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        Parameter(
            help="A step of this program that `zeroir run --trace` measured, shown over the simulated one."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write one HTML page about a compiled program, or two: steps over time, memory, ops, units and laws.

    Example: zeroir report gpt.zir -o gpt.html --machine dgx-h100

    Example: zeroir report gpt2.zir gpt3.zir -o both.html

    Example: zeroir report gpt.zir --trace trace.json
    """
    from zeroir.api import load_program
    from zeroir.api.search.histogram import counts_for, mean_sizes, require_no_sizes
    from zeroir.artifact.outputs import PAGE, require_writable, write_whole
    from zeroir.config.shapes import values_given, values_text
    from zeroir.cost.histogram import mean_step
    from zeroir.cost.machine import load_machine
    from zeroir.ir.byte_sizes import parse_bytes
    from zeroir.report.mean_step import mean_text
    from zeroir.report.measured import read_measured_step
    from zeroir.report.page.charts import require_bokeh
    from zeroir.report.page.html import report_html

    if other is not None and trace is not None:
        raise UserError("--trace can be combined only with one program: leave out the second one.")
    files = [program] if other is None else [program, other]
    path = Path(f"{'-'.join(file.stem for file in files)}.html") if output is None else output
    require_writable(path, PAGE)
    require_bokeh()
    described = load_machine(machine)
    given_bytes = None if memory_budget is None else parse_bytes(memory_budget)
    loaded = [load_program(file) for file in files]
    measured = None if trace is None else read_measured_step(trace, loaded[0].program)
    has_dims = any(compiled.program.dims for compiled in loaded)
    require_no_sizes(histogram, at)
    given: Mapping[str, int] | str | None = at
    mean = None
    if histogram is not None:
        if other is not None:
            raise UserError(
                "--histogram can be combined only with one program: leave out the second one."
            )
        counts = counts_for(loaded[0], histogram)
        given = mean_sizes(loaded[0].program, counts)
        mean = mean_step(loaded[0].program, described, counts)
    sizes = [
        # Beside a program with dims, one for batches of one shape is compared as it is.
        values_given(compiled.program, given if compiled.program.dims or not has_dims else None)
        for compiled in loaded
    ]
    reported = [
        _reported(
            compiled.at(values),
            described,
            name=f"{file.name} at {values_text(values)}" if values else file.name,
            budget_bytes=given_bytes,
            micro_steps=None if measured is None else measured.micro_steps,
        )
        for file, compiled, values in zip(files, loaded, sizes, strict=True)
    ]
    page = report_html(*reported, measured=measured)
    write_whole(path, page.encode(), PAGE)
    if as_json:
        budgets = [of_program.budget_bytes for of_program in reported]
        print_json(
            {
                "path": str(path),
                "machine": described.name,
                "at": sizes[0],
                **({} if mean is None else {"mean": asdict(mean)}),
                "memory_budget_bytes": budgets[0],
                **(
                    {}
                    if other is None
                    else {"other_memory_budget_bytes": budgets[1], "other_at": sizes[1]}
                ),
            }
        )
    else:
        if mean is not None:
            out.print(f"mean step  {mean_text(mean)}")
        out.print(f"Wrote {path}.")
    return 0


def _reported(
    compiled: CompiledProgram,
    machine: DescribedMachine,
    *,
    name: str,
    budget_bytes: int | None,
    micro_steps: int | None,
) -> ReportedProgram:
    """Report a loaded program on a machine, with its own budget unless one is given, else with the machine's memory."""
    from zeroir.cost.measured_workspaces import with_measured_workspaces
    from zeroir.cost.simulate import simulate
    from zeroir.report.page.sides import ReportedProgram

    if budget_bytes is None:
        budget_bytes = compiled.options.offload.memory_budget_bytes
    if budget_bytes is None:
        budget_bytes = int(machine.memory.size_bytes.value)
    return ReportedProgram(
        name=name,
        program=with_measured_workspaces(compiled.program, machine),
        report=compiled.report,
        summary=compiled.summary(),
        simulation=simulate(
            compiled.program, machine, logical=compiled.logical, micro_steps=micro_steps
        ),
        budget_bytes=budget_bytes,
    )
