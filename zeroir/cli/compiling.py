"""The commands that compile a model. Only they need the options, which are slow to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import AsJson, AtLeastOne, InSeeds, Kernels, Model
from zeroir.cli.console import out, print_json, progress
from zeroir.config import CompileOptions

Options = Annotated[CompileOptions | None, Parameter(name="*")]


def compile(  # noqa: A001 - the command's name is the field's word
    model: Model,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["-o", "--output"],
            help="The program file to write. [default: MODEL.zir in the current folder]",
        ),
    ] = None,
    options: Options = None,
    as_json: AsJson = False,
) -> int:
    """Trace a model, place every collective for the stage, prove the schedule, and write a program.

    Example: zeroir compile examples/gpt.py --stage 3 --world-size 4 -o gpt.zir
    """
    from zeroir.api import compile_with
    from zeroir.api.sentences import warnings_as_sentences
    from zeroir.artifact.outputs import PROGRAM, require_writable
    from zeroir.report.render import render_summary

    source = Path(model.partition(":")[0])
    path = Path(f"{source.stem}.zir") if output is None else output
    require_writable(path, PROGRAM)
    with progress(f"Compiling {model}"), warnings_as_sentences():
        compiled = compile_with(model, options or CompileOptions())
        compiled.save(path)
    if as_json:
        print_json({"path": str(path), **compiled.summary()})
    else:
        out.print(render_summary(compiled.summary()))
        out.print(f"Wrote {path}.", markup=False)
    return 0


def check(
    model: Model,
    /,
    *,
    options: Options = None,
    steps: Annotated[int, Parameter(validator=AtLeastOne, help="Training steps to compare.")] = 3,
    seed: Annotated[
        int,
        Parameter(validator=InSeeds, help="Seed of weights, data, dropout and interleaving."),
    ] = 0,
    kernels: Kernels = "eager",
    as_json: AsJson = False,
) -> int:
    """Compare the program on virtual ranks with eager PyTorch replicas; exit 1 if they differ.

    Example: zeroir check examples/gpt.py --stage 3 --world-size 4
    """
    from zeroir.api.check import check_model
    from zeroir.api.sentences import warnings_as_sentences

    with progress(f"Checking {model}"), warnings_as_sentences():
        comparison = check_model(
            model, options or CompileOptions(), steps=steps, seed=seed, kernels=kernels
        )
    if as_json:
        print_json(comparison.to_json())
    else:
        out.print(str(comparison), markup=False)
    return 0 if comparison.is_equal else 1
