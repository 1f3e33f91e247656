"""The command that measures a machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import AsJson, AtLeastOne, InSeeds, Kernels, ProgramFile
from zeroir.cli.console import out, print_json
from zeroir.errors import UserError


def profile(
    program: ProgramFile,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=["-o", "--output"], help="The machine file to write (.toml).")
    ],
    nproc: Annotated[
        int | None,
        Parameter(validator=AtLeastOne, help="Start this many local ranks with torchrun."),
    ] = None,
    machine: Annotated[
        str, Parameter(help="The machine whose figures stand for what is not measured.")
    ] = "cpu-local",
    rounds: Annotated[
        int,
        Parameter(validator=AtLeastOne, help="Rounds: in each some steps are timed, one recorded."),
    ] = 20,
    seed: Annotated[
        int, Parameter(validator=InSeeds, help="Seed of weights, data and dropout.")
    ] = 0,
    model: Annotated[
        str | None,
        Parameter(
            help="The model file, where it has moved, or was compiled from a path that is absolute or leads up."
        ),
    ] = None,
    allow_model_change: Annotated[
        bool, Parameter(negative=(), help="Run although the model file changed since compilation.")
    ] = False,
    kernels: Kernels = "eager",
    as_json: AsJson = False,
) -> int:
    """Measure segments, collectives and other ops of a program with all ranks running, and write a machine file.

    Example: zeroir profile gpt.zir --nproc 2 -o here.toml
    """
    from zeroir.api.job import launch
    from zeroir.api.profile import profile_program
    from zeroir.artifact.outputs import MACHINE, require_writable
    from zeroir.report.costs import format_seconds

    is_rank = "RANK" in os.environ
    if not is_rank or os.environ["RANK"] == "0":
        require_writable(output, MACHINE)
        if output.suffix != ".toml":
            raise UserError(f"A machine file ends in .toml, unlike '{output}'.")
    if nproc is not None and not is_rank:
        arguments = ["profile", str(program), "--output", str(output), "--machine", machine]
        arguments += ["--rounds", str(rounds), "--seed", str(seed), "--kernels", kernels]
        arguments += [] if model is None else ["--model", model]
        arguments += ["--allow-model-change"] if allow_model_change else []
        return launch(nproc, [*arguments, *(["--json"] if as_json else [])])
    found = profile_program(
        program,
        output=output,
        machine=machine,
        rounds=rounds,
        seed=seed,
        model=model,
        allow_model_change=allow_model_change,
        kernels=kernels,
    )
    if found is None:
        return 0
    if as_json:
        print_json(found.to_json())
        return 0
    ratio = found.predicted_s / found.step_s - 1
    noise = "no noise floor: one round" if found.noise is None else f"noise floor {found.noise:.1%}"
    out.print(
        f"step       {format_seconds(found.step_s)} measured ({noise}), "
        f"{format_seconds(found.predicted_s)} predicted ({ratio:+.1%})",
        markup=False,
    )
    out.print(
        f"measured   {len(found.machine.segments)} segments, {len(found.machine.collectives)} kinds of collectives, "
        f"{len(found.machine.ops)} of other ops, {format_seconds(found.machine.host.issue_s.value)} to issue an op",
        markup=False,
    )
    out.print(f"Wrote {output}.", markup=False)
    return 0
