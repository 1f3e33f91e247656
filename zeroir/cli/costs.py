"""Commands that say what a step takes before anybody runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import DEFAULT_MACHINE, AsJson, AtLeastOne, Machine
from zeroir.cli.console import err, out, print_json
from zeroir.cost.estimate import EstimateOptions


def simulate(
    program: Annotated[Path, Parameter(help="A compiled program (.zir).")],
    /,
    *,
    machine: Machine = DEFAULT_MACHINE,
    straggler: Annotated[
        float | None, Parameter(help="Rank 0's own work takes this many times as long.")
    ] = None,
    micro_steps: Annotated[
        int | None,
        Parameter(
            validator=AtLeastOne, help="Micro-steps of the step. [default: those compiled for]"
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        Parameter(help="Write when every op begins and ends, for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict how long a step of a compiled program takes on a machine, and what bounds it.

    Example: zeroir simulate gpt.zir --machine dgx-a100-80g --straggler 1.2
    """
    from zeroir.api import load_program
    from zeroir.api.costs import simulate as simulate_program
    from zeroir.artifact.outputs import TIMELINE, require_writable, write_whole
    from zeroir.report.costs import render_simulation, simulation_json
    from zeroir.report.trace import simulated_trace

    if trace is not None:
        require_writable(trace, TIMELINE)
    compiled = load_program(program)
    found = simulate_program(compiled, machine, straggler=straggler, micro_steps=micro_steps)
    if as_json:
        print_json(simulation_json(compiled.program, found))
    else:
        out.print(render_simulation(compiled.program, found))
    if trace is not None:
        document = simulated_trace(compiled.program, found)
        write_whole(trace, json.dumps(document, separators=(",", ":")).encode(), TIMELINE)
        err.print(f"Wrote {trace}: open it at ui.perfetto.dev.", markup=False)
    return 0


def estimate(
    *,
    options: Annotated[EstimateOptions, Parameter(name="*")],
    as_json: AsJson = False,
) -> int:
    """Estimate memory, communication and activations of training at every ZeRO stage, without a model.

    Example: zeroir estimate --params 7.5e9 --world-size 64
    """
    from zeroir.cost.estimate import estimate as estimate_with
    from zeroir.report.costs import estimate_json, render_estimate

    found = estimate_with(options)
    if as_json:
        print_json(estimate_json(found))
    else:
        out.print(render_estimate(found))
    return 0
