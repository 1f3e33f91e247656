"""The commands of ``zeroir``: what they take and what they call. Torch is imported only by those that need it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from pydantic import ValidationError

from zeroir import __version__
from zeroir.cli.console import err, out, print_json, progress
from zeroir.config import CompileOptions, explain_validation
from zeroir.errors import UserError, ZeroirError

app = App(
    name="zeroir",
    help="Compile PyTorch training steps into verified ZeRO schedules, read them, and run them.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable=()),
)

Model = Annotated[
    str, Parameter(help="MODEL.PY or MODEL.PY:FACTORY; the file defines model() and batch().")
]
ProgramFile = Annotated[Path, Parameter(help="A compiled program (.zir).")]
Options = Annotated[CompileOptions | None, Parameter(name="*")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON document.")]
AtLeastOne = Number(gte=1)


@app.command
def compile(  # noqa: A001 - the command's name is the field's word
    model: Model,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["-o", "--output"], help="Where to write; MODEL.zir here if not given."),
    ] = None,
    options: Options = None,
    as_json: AsJson = False,
) -> int:
    """Trace a model, place every collective for the stage, prove the schedule, and write a program.

    Example: zeroir compile examples/gpt.py --stage 3 --world-size 4 -o gpt.zir
    """
    from zeroir.api import compile_with
    from zeroir.cli.render import print_summary

    path = output or Path(f"{Path(model.partition(':')[0]).stem}.zir")
    with progress(f"Compiling {model}"):
        compiled = compile_with(model, options or CompileOptions())
        compiled.save(path)
    if as_json:
        print_json({"path": str(path), **compiled.summary()})
    else:
        print_summary(out, compiled.summary())
        out.print(f"Wrote {path}.", markup=False)
    return 0


@app.command
def show(
    program: ProgramFile,
    /,
    *,
    section: Annotated[str | None, Parameter(help="Only this section.")] = None,
    unit: Annotated[str | None, Parameter(help="Only the ops of this unit.")] = None,
    text: Annotated[
        bool, Parameter(negative=(), help="Print the whole program in the IR's text.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Print the communication schedule of a compiled program.

    Example: zeroir show gpt.zir --section last_micro_step --unit blocks.0
    """
    from zeroir.api import load_program
    from zeroir.cli.render import print_schedule, print_summary, schedule_json

    compiled = load_program(program)
    compiled.require(section=section, unit=unit)
    if text:
        sys.stdout.write(compiled.text())
    elif as_json:
        rows = schedule_json(compiled.program, section=section, unit=unit)
        print_json({**compiled.summary(), "schedule": rows})
    else:
        print_summary(out, compiled.summary())
        print_schedule(out, compiled.program, section=section, unit=unit)
    return 0


@app.command
def diff(
    old: ProgramFile,
    new: ProgramFile,
    /,
    *,
    stat: Annotated[bool, Parameter(negative=(), help="Only the summary of what changed.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show what changes from one program to another; exit 1 when they differ, 0 when they are equal.

    Example: zeroir diff gpt2.zir gpt3.zir
    """
    from zeroir.api import load_program
    from zeroir.cli.render import print_diff
    from zeroir.ir.diff import diff as diff_programs
    from zeroir.ir.diff import summary as diff_summary

    before, after = load_program(old).program, load_program(new).program
    text = diff_programs(before, after)
    if as_json:
        facts = diff_summary(before, after)
        print_json({"is_equal": not text, "summary": facts.to_json(), "diff": text.splitlines()})
    else:
        print_diff(out, "" if stat else text, diff_summary(before, after))
    return 1 if text else 0


@app.command
def verify(program: ProgramFile, /, *, as_json: AsJson = False) -> int:
    """Prove every law of a compiled program; exit 1 with the findings when one does not hold.

    Example: zeroir verify gpt.zir
    """
    from zeroir.api import load_unverified
    from zeroir.cli.render import print_report, report_json

    report = load_unverified(program).report
    if as_json:
        print_json(report_json(report))
    else:
        print_report(out, report)
    return 0 if report.is_valid else 1


@app.command
def explain(
    code: Annotated[str, Parameter(help="A law's code, such as Z101.")],
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Explain a law: what it rules out, why, and a minimal program that breaks it.

    Example: zeroir explain Z101
    """
    from zeroir.ir.explain import CODES
    from zeroir.ir.explain import explain as explain_code

    if code.upper() not in CODES:
        raise UserError(f"No law has the code '{code}'; the codes are {', '.join(sorted(CODES))}.")
    text = explain_code(code.upper())
    if as_json:
        print_json({"code": code.upper(), "text": text})
    else:
        sys.stdout.write(text.rstrip() + "\n")
    return 0


@app.command
def check(
    model: Model,
    /,
    *,
    options: Options = None,
    steps: Annotated[int, Parameter(validator=AtLeastOne, help="Training steps to compare.")] = 3,
    seed: Annotated[int, Parameter(help="Seed of weights, data, dropout and interleaving.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Run the program on virtual ranks against eager PyTorch replicas; exit 1 and say where they differ.

    Example: zeroir check examples/gpt.py --stage 3 --world-size 4
    """
    from zeroir.api.check import check_model
    from zeroir.cli.render import print_comparison

    with progress(f"Checking {model}"):
        comparison = check_model(model, options or CompileOptions(), steps=steps, seed=seed)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(out, comparison)
    return 0 if comparison.is_equal else 1


@app.command
def run(
    program: ProgramFile,
    /,
    *,
    steps: Annotated[int, Parameter(validator=AtLeastOne, help="Training steps.")] = 100,
    nproc: Annotated[
        int | None,
        Parameter(validator=AtLeastOne, help="Start this many local ranks with torchrun."),
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of weights, data and dropout.")] = 0,
    log_every: Annotated[
        int, Parameter(validator=AtLeastOne, help="Print the loss every so many steps.")
    ] = 10,
    allow_model_change: Annotated[
        bool, Parameter(negative=(), help="Run although the model file changed since compilation.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train a compiled program under torchrun, over NCCL on GPUs and gloo on CPUs.

    Example: torchrun --nproc-per-node 2 -m zeroir run gpt.zir --steps 100
    """
    from zeroir.api.run import launch, run_program

    if nproc is not None and "RANK" not in os.environ:
        return launch(nproc, sys.argv[1:])
    run_program(
        program,
        steps=steps,
        seed=seed,
        log_every=log_every,
        allow_model_change=allow_model_change,
        as_json=as_json,
    )
    return 0


def main() -> None:
    """The entry point: exit 0 on success, 1 on a finding, 2 on a user's error, 70 on ours, 130 on Ctrl-C."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Carry out one command line and return its exit code; errors are printed, never raised."""
    try:
        result = app(
            list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        return _fail(2, _explain_usage(error))
    except ValidationError as error:
        return _fail(2, explain_validation(error))
    except ZeroirError as error:
        return _fail(error.exit_code, str(error))
    except KeyboardInterrupt:
        return _fail(130, "Interrupted.")
    except BrokenPipeError:
        # The reader went away (`zeroir show … | head`): say nothing more, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - the last resort, which must not look like a finding (exit code 1)
        traceback.print_exc()
        return _fail(70, "This is a defect of zeroir; please report it with the lines above.")
    return result if isinstance(result, int) else 0


def _fail(exit_code: int, sentence: str) -> int:
    err.print(sentence if exit_code == 130 else f"Error: {sentence}", style="red", markup=False)
    return exit_code


def _explain_usage(error: CycloptsError) -> str:
    if isinstance(error.__cause__, ValidationError):
        return explain_validation(error.__cause__)
    command = " ".join(["zeroir", *(error.command_chain or ())])
    return f"{' '.join(str(error).split())} See `{command} --help`."
