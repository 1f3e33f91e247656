"""The commands of ``zeroir``: what they take and what they call. Torch is imported only by those that need it."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError
from cyclopts.validators import Number
from pydantic import ValidationError

from zeroir import __version__
from zeroir.cli.console import err, out, print_json, progress
from zeroir.config import CompileOptions, explain_validation
from zeroir.errors import UserError, ZeroirError


def _shown_default(value: object) -> str | None:
    # That a flag is off and a list empty goes without saying; for None the description speaks.
    return None if value is False or value in (None, ()) else str(value)


app = App(
    name="zeroir",
    help="Compile PyTorch training steps into verified ZeRO schedules, read them, and run them.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable=(), show_default=_shown_default),
    suppress_keyboard_interrupt=False,
)

Model = Annotated[
    str, Parameter(help="MODEL.PY or MODEL.PY:FACTORY; the file defines model() and batch().")
]
ProgramFile = Annotated[Path, Parameter(help="A compiled program (.zir).")]
Options = Annotated[CompileOptions | None, Parameter(name="*")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON document.")]
AtLeastOne = Number(gte=1)
Kernels = Annotated[
    Literal["eager", "inductor"],
    Parameter(
        help="What computes segments: torch's operators one by one, or code compiled once and kept on disk."
    ),
]


@app.command
def compile(  # noqa: A001 - the command's name is the field's word
    model: Model,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["-o", "--output"], help="Where to write. [default: MODEL.zir, here]"),
    ] = None,
    options: Options = None,
    as_json: AsJson = False,
) -> int:
    """Trace a model, place every collective for the stage, prove the schedule, and write a program.

    Example: zeroir compile examples/gpt.py --stage 3 --world-size 4 -o gpt.zir
    """
    from zeroir.api import compile_with
    from zeroir.artifact import require_writable
    from zeroir.cli.render import print_summary

    source = Path(model.partition(":")[0])
    path = Path(f"{source.stem}.zir") if output is None else output
    require_writable(path)
    if path.exists() and source.exists() and path.samefile(source):
        raise UserError(f"'{path}' is the model file itself: name another file to write.")
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
        bool,
        Parameter(negative=(), help="Print the program in the IR's text, all of it or a section."),
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
    if text and (as_json or unit is not None):
        raise UserError("--text goes with --section alone, not with --unit or --json.")
    if text:
        sys.stdout.write(compiled.text(section=section))
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
    exit_code: Annotated[
        bool, Parameter(negative=(), help="Exit with 1 when the programs differ, as for a script.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show what changes from one program to another.

    Example: zeroir diff gpt2.zir gpt3.zir
    """
    from zeroir.api import load_program
    from zeroir.cli.render import print_diff, print_diff_summary
    from zeroir.ir.diff import diff as diff_programs
    from zeroir.ir.diff import summary as diff_summary

    before, after = load_program(old).program, load_program(new).program
    text = diff_programs(before, after, old_name=str(old), new_name=str(new))
    facts = diff_summary(before, after)
    if as_json:
        print_json({"is_equal": not text, "summary": facts.to_json(), "diff": text.splitlines()})
    elif not text:
        out.print(f"{old} and {new} hold equal programs.", markup=False)
    else:
        print_diff(out, "" if stat else text)
        print_diff_summary(out, facts)
    return 1 if text and exit_code else 0


@app.command
def verify(
    program: ProgramFile,
    /,
    *,
    budget: Annotated[
        str | None,
        Parameter(help="Device memory of a rank, such as 80GB: prove that buffers fit (Z301)."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Prove every law of a compiled program; exit 1 with the findings when one does not hold.

    Example: zeroir verify gpt.zir
    """
    from zeroir.api import load_unverified
    from zeroir.cli.render import print_report, report_json
    from zeroir.report.names import parse_bytes

    budget_bytes = None if budget is None else parse_bytes(budget)
    report = load_unverified(program, budget_bytes=budget_bytes).report
    if as_json:
        print_json(report_json(report))
    else:
        print_report(out, report)
    return 0 if report.is_valid else 1


@app.command
def explain(
    code: Annotated[str | None, Parameter(help="A law's code, such as Z101; all if none.")] = None,
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Explain a law: what it rules out, why, and a minimal program that breaks it. Without a code, list them.

    Example: zeroir explain Z101
    """
    from zeroir.cli.render import law_json, print_laws
    from zeroir.ir.explain import CODES
    from zeroir.ir.explain import explain as explain_code

    if code is None:
        if as_json:
            print_json({"laws": [law_json(known) for known in CODES]})
        else:
            print_laws(out)
        return 0
    code = code.upper()
    if code not in CODES:
        raise UserError(
            f"No law has the code '{code}'; `zeroir explain` lists those there are, such as Z101."
        )
    if as_json:
        print_json({**law_json(code), "text": explain_code(code)})
    else:
        sys.stdout.write(explain_code(code).rstrip() + "\n")
    return 0


@app.command
def check(
    model: Model,
    /,
    *,
    options: Options = None,
    steps: Annotated[int, Parameter(validator=AtLeastOne, help="Training steps to compare.")] = 3,
    seed: Annotated[int, Parameter(help="Seed of weights, data, dropout and interleaving.")] = 0,
    kernels: Kernels = "eager",
    as_json: AsJson = False,
) -> int:
    """Run the program on virtual ranks against eager PyTorch replicas; exit 1 and say where they differ.

    Example: zeroir check examples/gpt.py --stage 3 --world-size 4
    """
    from zeroir.api.check import check_model
    from zeroir.cli.render import print_comparison

    with progress(f"Checking {model}"):
        comparison = check_model(
            model, options or CompileOptions(), steps=steps, seed=seed, kernels=kernels
        )
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
    model: Annotated[
        str | None,
        Parameter(help="The model file, where it has moved away from where it was compiled."),
    ] = None,
    allow_model_change: Annotated[
        bool, Parameter(negative=(), help="Run although the model file changed since compilation.")
    ] = False,
    trace: Annotated[
        Path | None,
        Parameter(
            help="Write when every op of the last step began and ended, on all ranks, for ui.perfetto.dev."
        ),
    ] = None,
    kernels: Kernels = "eager",
    cuda_graphs: Annotated[
        bool,
        Parameter(
            negative=(), help="On a GPU, launch whole sections as CUDA graphs where they can be."
        ),
    ] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", negative=(), help="Print one JSON object a line.")
    ] = False,
) -> int:
    """Train a compiled program under torchrun, over NCCL on GPUs; on CPUs over gloo, or the memory of one host.

    Example: torchrun --nproc-per-node 2 -m zeroir run gpt.zir --steps 100
    """
    from zeroir.api.run import launch, require_traceable, run_program

    if trace is not None and "RANK" not in os.environ:
        require_traceable(trace, program)
    if nproc is not None and "RANK" not in os.environ:
        numbers = {"--steps": steps, "--seed": seed, "--log-every": log_every}
        flags = {
            "--allow-model-change": allow_model_change,
            "--cuda-graphs": cuda_graphs,
            "--json": as_json,
        }
        arguments = ["run", str(program)]
        arguments += [text for name, value in numbers.items() for text in (name, str(value))]
        arguments += [] if model is None else ["--model", model]
        arguments += [] if trace is None else ["--trace", str(trace)]
        arguments += ["--kernels", kernels]
        return launch(nproc, [*arguments, *(name for name, is_set in flags.items() if is_set)])
    run_program(
        program,
        steps=steps,
        seed=seed,
        log_every=log_every,
        model=model,
        allow_model_change=allow_model_change,
        as_json=as_json,
        trace=trace,
        cuda_graphs=cuda_graphs,
        kernels=kernels,
    )
    return 0


def run_command(arguments: Sequence[str]) -> int:
    """Carry out one command line and return its exit code; errors are printed, never raised."""
    try:
        result = app(
            list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(2, _explain_usage(error))
    except ValidationError as error:
        return _fail(2, explain_validation(error))
    except ZeroirError as error:
        return _fail(error.exit_code, str(error))
    except KeyboardInterrupt:
        return _fail(130, "Interrupted.")
    except BrokenPipeError:
        # The reader went away (`zeroir show … | head`) and wants to hear no more.
        _abandon_stdout()
        return 0
    except Exception as error:  # noqa: BLE001 - the last resort, which must not look like a finding (exit code 1)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _abandon_stdout()
            return _fail(2, f"Not everything could be written: {error.strerror}.")
        traceback.print_exc()
        return _fail(70, "This is a defect of zeroir; please report it with the lines above.")
    return result if isinstance(result, int) else 0


def _abandon_stdout() -> None:
    """Let what is still in the buffer go nowhere when the interpreter flushes it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(exit_code: int, sentence: str) -> int:
    err.print(sentence if exit_code == 130 else f"Error: {sentence}", style="red", markup=False)
    return exit_code


def _explain_usage(error: CycloptsError) -> str:
    if isinstance(error.__cause__, ValidationError):
        return explain_validation(error.__cause__)
    command = " ".join(["zeroir", *(error.command_chain or ())])
    match error:
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            sentence = f"The argument '{first}' is one too many."
        case MissingArgumentError(argument=argument) if argument is not None:
            name = error.keyword or argument.name
            sentence = f"{name} needs a value." if name.startswith("-") else f"{name} is missing."
        case _:
            sentence = " ".join(str(error).split())
    return f"{sentence} See `{command} --help`."
