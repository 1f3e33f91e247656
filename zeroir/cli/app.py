"""The commands of ``zeroir``: their arguments and the functions that they call. Few of them import torch."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from zeroir import __version__
from zeroir.cli.arguments import AsJson, ProgramFile
from zeroir.cli.console import accept_any_text, err, help_console, out, print_json, shortened_words
from zeroir.cli.exports import print_pass, show_passes
from zeroir.errors import (
    MEMORY_REMEDY,
    UserError,
    ZeroirError,
    explain_path,
    is_out_of_memory,
    leave_reason,
)


def _shown_default(value: object) -> str | None:
    # A flag that is off and an empty list need no words; the description of an option explains None.
    return None if value is False or value in (None, ()) else str(value)


def _require_whole_numbers(
    _app: App, _commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Refuse fractions for integers, which cyclopts would round."""
    for argument in arguments:
        if int in (argument.hint, *get_args(argument.hint)):
            for token in argument.tokens:
                if "." in token.value:
                    raise CoercionError(token=token, argument=argument, target_type=int)


app = App(
    name="zeroir",
    help="Compile PyTorch training steps into verified ZeRO schedules, read them, and run them.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable=(), show_default=_shown_default),
    suppress_keyboard_interrupt=False,
    console=help_console,
    config=(_require_whole_numbers,),
)


@app.command
def show(
    program: ProgramFile,
    /,
    *,
    section: Annotated[str | None, Parameter(help="Only this section.")] = None,
    unit: Annotated[str | None, Parameter(help="Only the ops of this unit.")] = None,
    unfold: Annotated[
        bool, Parameter(negative=(), help="Print every row instead of folding equal blocks.")
    ] = False,
    text: Annotated[
        bool,
        Parameter(negative=(), help="Print the text of the program, or of a section."),
    ] = False,
    passes: Annotated[
        bool,
        Parameter(
            negative=(), help="Print the changes of each pass: ops, bytes on the wire, peak memory."
        ),
    ] = False,
    after_pass: Annotated[
        int | None,
        Parameter(
            name="--pass",
            help="Show the program after the pass with this number (see --passes); 0 is before the first.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print the communication schedule of a compiled program.

    Example: zeroir show gpt.zir --section last_micro_step --unit blocks.0
    """
    from zeroir.api import load_program
    from zeroir.report.config import config_json, render_config
    from zeroir.report.render import render_schedule, render_summary, schedule_json

    compiled = load_program(program)
    if after_pass is not None:
        compiled = compiled.after_pass(after_pass)
    if passes:
        if text or unfold or section or unit or after_pass is not None:
            raise UserError("--passes can be combined only with --json.")
        return show_passes(compiled, as_json=as_json)
    compiled.require(section=section, unit=unit)
    if text and (as_json or unfold or unit is not None):
        raise UserError(
            "--text can be combined with --section and --pass, not with --unit, --unfold or --json."
        )
    if text:
        sys.stdout.write(compiled.text(section=section))
    elif as_json:
        rows = schedule_json(compiled.program, section=section, unit=unit)
        facts = {**config_json(compiled.artifact), **compiled.summary()}
        print_json({**facts, "schedule": rows})
    else:
        if after_pass is not None:
            print_pass(compiled)
        if compiled.artifact.config is not None:
            out.print(render_config(compiled.artifact.config, compiled.program))
        out.print(render_summary(compiled.summary()))
        out.print(render_schedule(compiled.program, section=section, unit=unit, is_unfolded=unfold))
    return 0


@app.command
def diff(
    old: ProgramFile,
    new: ProgramFile,
    /,
    *,
    stat: Annotated[
        bool, Parameter(negative=(), help="Print only the summary of the changes.")
    ] = False,
    exit_code: Annotated[
        bool, Parameter(negative=(), help="Exit with 1 if the programs differ.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show the differences between two programs.

    Example: zeroir diff gpt2.zir gpt3.zir
    """
    from zeroir.api import load_program
    from zeroir.report.diff import diff as diff_programs
    from zeroir.report.diff import summary as diff_summary
    from zeroir.report.render import render_diff

    before, after = load_program(old).program, load_program(new).program
    text = diff_programs(before, after, old_name=str(old), new_name=str(new))
    facts = diff_summary(before, after)
    if as_json:
        print_json({"is_equal": not text, "summary": asdict(facts), "diff": text.splitlines()})
    elif not text:
        out.print(f"{old} and {new} hold equal programs.")
    else:
        if not stat:
            out.print(render_diff(text))
        out.print(str(facts))
    return 1 if text and exit_code else 0


@app.command
def verify(
    program: ProgramFile,
    /,
    *,
    budget: Annotated[
        str | None,
        Parameter(
            name=["--budget", "--memory-budget"],
            help="Prove that this device memory of a rank, such as 80GB, suffices (Z301).",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        Parameter(
            help="A machine file that `zeroir profile` wrote; its measured workspaces are used."
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        Parameter(
            help="Write why each law holds to this file, for a program that checks it: docs/trust.md."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Prove every law of a compiled program; exit 1 with the findings if one is broken.

    Example: zeroir verify gpt.zir
    """
    from zeroir.api import load_unverified
    from zeroir.ir.byte_sizes import parse_bytes
    from zeroir.report.render import render_report, report_json

    budget_bytes = None if budget is None else parse_bytes(budget)
    if certificate is not None:
        from zeroir.artifact.outputs import CERTIFICATE, require_writable

        require_writable(certificate, CERTIFICATE)
    measured_machine = None
    if machine is not None:
        from zeroir.cost.machine import load_machine

        measured_machine = load_machine(machine)
        if not measured_machine.has_workspaces:
            raise UserError(
                f"No workspaces were measured on '{machine}': name a file that `zeroir profile` wrote."
            )
    compiled = load_unverified(program, budget_bytes=budget_bytes, machine=measured_machine)
    if (
        measured_machine is not None
        and budget is None
        and compiled.options.offload.memory_budget is None
    ):
        raise UserError("--machine has an effect only with a budget: give one with --budget.")
    report = compiled.report
    if certificate is not None and report.is_valid:
        from zeroir.api.certificates import write_certificate

        write_certificate(compiled, program, certificate)
    if as_json:
        print_json(report_json(report))
    else:
        out.print(render_report(report))
    return 0 if report.is_valid else 1


@app.command
def explain(
    code: Annotated[
        str | None, Parameter(help="A law's code, such as Z101. [default: list all laws]")
    ] = None,
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Explain a law: the errors that it rules out, the reasons, and a minimal program that breaks it.

    Example: zeroir explain Z101
    """
    from zeroir.report.render import law_json, render_laws
    from zeroir.verify.laws import CODES

    if code is None:
        if as_json:
            print_json({"laws": [law_json(each) for each in CODES]})
        else:
            out.print(render_laws())
        return 0
    code = code.upper()
    if code not in CODES:
        raise UserError(
            f"No law has the code '{code}'; `zeroir explain` lists the codes, such as Z101."
        )
    if as_json:
        print_json({**law_json(code), "text": CODES[code].text})
    else:
        sys.stdout.write(CODES[code].text)
    return 0


# Imported only if they are called: their arguments are slow to load.
app.command("zeroir.cli.compiling:compile", name="compile")
app.command("zeroir.cli.compiling:check", name="check")
app.command("zeroir.cli.training:run", name="run")
app.command("zeroir.cli.costs:simulate", name="simulate")
app.command("zeroir.cli.costs:estimate", name="estimate")
app.command("zeroir.cli.plan:plan", name="plan")
app.command("zeroir.cli.profile:profile", name="profile")
app.command("zeroir.cli.exports:export", name="export")
app.command("zeroir.cli.imports:import_", name="import")
app.command("zeroir.cli.page:report", name="report")
app.command("zeroir.cli.checkpoint:app", name="checkpoint")
app.command("zeroir.cli.completion:completion", name="completion")


def run_command(arguments: Sequence[str]) -> int:
    """Carry out one command line and return its exit code; errors are printed, never raised."""
    accept_any_text()
    try:
        if arguments[:1] in ([], ["--help"], ["-h"]):
            app.resolved_commands()  # so that the list describes each of them
        result = app(
            list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(2, _explain_usage(error))
    except ZeroirError as error:
        return _fail(error.exit_code, str(error))
    except KeyboardInterrupt:
        return _fail(130, "Interrupted.")
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return _fail(
            2,
            f"{frame.filename}:{frame.lineno} called sys.exit, which a model must not do: raise an error there.",
        )
    except BrokenPipeError:
        # The reader has ended (`zeroir show … | head`), so nothing more is printed.
        _abandon_stdout()
        return 0
    except Exception as error:  # noqa: BLE001 - the last resort, which must not look like a finding (exit code 1)
        if (sentence := _explain_options(error)) is not None:
            return _fail(2, shortened_words(sentence))
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            _abandon_stdout()
            return _fail(2, f"Not everything could be written: {error.strerror}.")
        if (sentence := explain_path(error)) is not None:
            return _fail(2, shortened_words(sentence))
        if is_out_of_memory(error):
            return _fail(2, f"Memory ran out: {MEMORY_REMEDY}.")
        traceback.print_exc()
        return _fail(70, "This is a defect of zeroir; please report it with the lines above.")
    return result if isinstance(result, int) else 0


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a full disk, a closed terminal or a stream that is only for reading."""


def _abandon_stdout() -> None:
    """Discard the buffered output that the interpreter would flush at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(exit_code: int, sentence: str) -> int:
    sentence = sentence if exit_code == 130 else f"Error: {sentence}"
    leave_reason(sentence)
    try:
        err.print(sentence, style="red")
    except MemoryError:  # rich takes some
        sys.stderr.write(f"{sentence}\n")
    return exit_code


def _explain_options(error: BaseException | None) -> str | None:
    """Explain a pydantic error in one sentence, and no other error. Commands without options do not load pydantic."""
    if "pydantic" not in sys.modules:
        return None
    from pydantic import ValidationError

    from zeroir.config import explain_validation

    return explain_validation(error) if isinstance(error, ValidationError) else None


def _explain_usage(error: CycloptsError) -> str:
    if (explained := _explain_options(error.__cause__)) is not None:
        return shortened_words(explained)
    command = " ".join(["zeroir", *(error.command_chain or ())])
    match error:
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            sentence = f"There is one argument too many: '{first}'."
        case MissingArgumentError(keyword=str(name)):
            sentence = f"{name} needs a value."
        case MissingArgumentError(argument=argument) if argument is not None:
            # What stands in its place may be an option that the command does not have.
            unknown = _unknown_options(error)
            sentence = f"Unknown option: {unknown[0]}; " if unknown else ""
            sentence += f"{argument.name} is missing."
        case UnknownOptionError(token=Token(keyword=str(name))) if _is_of_compile(command, name):
            sentence = (
                f"{name} is an option of `zeroir compile`: compile the program again with it."
            )
        case CoercionError(target_type=target, token=Token(keyword=name, value=text)) if (
            target is int
        ):
            sentence = f"{name} is {shortened_words(text)}, but should be a whole number."
        case ValidationError(argument=argument, exception_message=reason) if (
            argument is not None and reason.startswith("Must ")
        ):
            given = shortened_words(argument.tokens[0].value)
            sentence = f"{argument.name} is {given}, but m{reason[1:]}"
        case _:
            sentence = shortened_words(" ".join(str(error).split()))
    return f"{sentence} See `{command} --help`."


def _unknown_options(error: CycloptsError) -> list[str]:
    """Return the options that a command does not have, as they were given."""
    match error:
        case UnknownOptionError(token=Token(keyword=str(name))):
            return [name]
        case MissingArgumentError():
            return [token for token in error.unused_tokens or () if token.startswith("-")]
        case _:
            return []


def _is_of_compile(command: str, option: str) -> bool:
    """Return whether an option that ``zeroir run`` does not have is one of ``zeroir compile``."""
    if command != "zeroir run":
        return False
    return any(
        option in argument.names for argument in app["compile"].assemble_argument_collection()
    )
