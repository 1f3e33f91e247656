"""Commands that predict the costs of a step: time, memory and communication."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import (
    DEFAULT_MACHINE,
    AsJson,
    At,
    InCounts,
    Machine,
    ProgramFile,
    SizesHistogram,
)
from zeroir.cli.console import err, out, print_json
from zeroir.cli.option_groups import AllowModelChange, EstimateParameters, MovedModel
from zeroir.cost.estimate_options import make_estimate_options
from zeroir.errors import UserError


def simulate(
    program: ProgramFile,
    /,
    *,
    machine: Machine = DEFAULT_MACHINE,
    straggler: Annotated[
        float | None, Parameter(help="Multiply the time of rank 0's own work by this factor.")
    ] = None,
    micro_steps: Annotated[
        int | None,
        Parameter(validator=InCounts, help="Number of micro-steps. [default: the program's]"),
    ] = None,
    at: At = None,
    histogram: SizesHistogram = None,
    model: MovedModel = None,
    allow_model_change: AllowModelChange = False,
    trace: Annotated[
        Path | None,
        Parameter(help="Write the beginning and the end of every op, for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict the time of a step of a compiled program on a machine, and its critical path.

    Example: zeroir simulate gpt.zir --machine dgx-a100-80g --straggler 1.2
    """
    from zeroir.api import load_program
    from zeroir.api.search.costs import simulate as simulate_program
    from zeroir.api.search.histogram import simulate_histogram
    from zeroir.artifact.outputs import TIMELINE, require_writable, write_whole
    from zeroir.report.costs import render_simulation, simulation_json
    from zeroir.report.mean_step import render_mean_step
    from zeroir.report.trace import simulated_trace

    if trace is not None:
        require_writable(trace, TIMELINE)
    compiled = load_program(program)
    if histogram is not None:
        if straggler is not None or at is not None or trace is not None:
            raise UserError(
                "--histogram cannot be combined with --at, --straggler and --trace, which are about one step."
            )
        mean = simulate_histogram(
            compiled,
            histogram,
            machine,
            micro_steps=micro_steps,
            model=model,
            allow_model_change=allow_model_change,
        )
        if as_json:
            print_json(asdict(mean))
        else:
            out.print(render_mean_step(mean))
        return 0
    if model is not None or allow_model_change:
        raise UserError("--model and --allow-model-change are for --histogram batches alone.")
    simulation = simulate_program(
        compiled, machine, straggler=straggler, micro_steps=micro_steps, at=at
    )
    if as_json:
        print_json(simulation_json(compiled.program, simulation))
    else:
        out.print(render_simulation(compiled.program, simulation))
    if trace is not None:
        document = simulated_trace(compiled.program, simulation)
        write_whole(trace, json.dumps(document, separators=(",", ":")).encode(), TIMELINE)
        err.print(f"Wrote {trace}: open it at ui.perfetto.dev.")
    return 0


def estimate(
    *,
    options: Annotated[EstimateParameters, Parameter(name="*")],
    at: Annotated[
        str | None,
        Parameter(
            help="Sizes of a step's batches, such as seq=512,batch=4; --seq and --batch are the largest."
        ),
    ] = None,
    histogram: Annotated[
        Path | None,
        Parameter(
            help="How often batches have which sizes: a CSV file with the columns seq, batch and count."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Estimate memory, communication and activations of training at every ZeRO stage, without a model.

    Example: zeroir estimate --params 7.5e9 --world-size 64
    """
    from zeroir.api.search.costs import estimate_with_options
    from zeroir.report.costs import estimate_json, render_estimate

    figures = estimate_with_options(make_estimate_options(options.given), at, histogram)
    if as_json:
        print_json(estimate_json(figures))
    else:
        out.print(render_estimate(figures))
    return 0
