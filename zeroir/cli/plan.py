"""The command that searches for the fastest options."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import (
    DEFAULT_MACHINE,
    AsJson,
    At,
    InCounts,
    Machine,
    Model,
    SizesHistogram,
)
from zeroir.cli.compiling import Config, print_notes, resolved
from zeroir.cli.console import out, print_json, progress
from zeroir.cli.option_groups import PlanParameters
from zeroir.errors import UserError


def plan(
    model: Model,
    /,
    *,
    machine: Machine = DEFAULT_MACHINE,
    memory: Annotated[
        str | None,
        Parameter(help="Device memory of a rank, such as 80GB. [default: the machine's]"),
    ] = None,
    at: At = None,
    histogram: SizesHistogram = None,
    largest_batch: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Narrow the dims of a model to the largest batches that fit, and plan for these.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        Parameter(name=["-o", "--output"], help="The program file to write. [default: none]"),
    ] = None,
    config: Config = None,
    options: Annotated[PlanParameters | None, Parameter(name="*")] = None,
    most_tried: Annotated[
        int, Parameter(validator=InCounts, help="Largest number of choices to try.")
    ] = 500,
    all_: Annotated[
        bool, Parameter(name="--all", negative=(), help="Print all alternatives.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Choose the options with the shortest step of a model on a machine, within its memory.

    Options below with the default "chosen" are chosen unless given.

    Example: zeroir plan examples/gpt.py --machine dgx-h100 --world-size 64 --memory 80GB -o gpt.zir
    """
    from zeroir.api.capture import file_source
    from zeroir.api.search.plan import plan_with
    from zeroir.api.sentences import warnings_as_sentences
    from zeroir.artifact.outputs import PROGRAM, require_writable
    from zeroir.cli.render_plan import plan_json, render_plan

    source = cache(lambda: file_source(model))
    chosen = resolved(config, options, source)
    print_notes(chosen)
    if memory is not None and chosen.options.offload.memory_budget is not None:
        raise UserError(
            "--memory and --memory-budget have the same meaning here; leave one of them out."
        )
    if output is not None:
        require_writable(output, PROGRAM)
    with progress(f"Planning {model}"), warnings_as_sentences():
        result = plan_with(
            source,
            machine,
            chosen,
            memory=memory,
            at=at,
            histogram=histogram,
            largest_batch=largest_batch,
            most_tried=most_tried,
        )
        if output is not None:
            result.compiled.save(output)
    if as_json:
        print_json({"path": None if output is None else str(output), **plan_json(result)})
        return 0
    out.print(render_plan(result, is_unfolded=all_))
    if output is not None:
        out.print(f"Wrote {output}.")
    return 0
