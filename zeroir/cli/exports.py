"""Commands that show a program to people: the changes of its passes, and files for viewers and browsers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, assert_never

from cyclopts import Parameter

from zeroir.cli.arguments import DEFAULT_MACHINE, AsJson
from zeroir.cli.console import err, out, print_json, progress
from zeroir.convert.formats import AS_TRAINED, MAX_SHARD_BYTES, CheckpointFormat, WeightDtype
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.api import CompiledProgram
    from zeroir.artifact.outputs import OutputKind

ProgramFormat = Literal["chrome", "memory-snapshot", "flight-recorder", "graphviz"]
"""The formats of compiled programs."""
FileFormat = Literal["chrome", "memory-snapshot", "graphviz"]
"""The formats of one file; ``flight-recorder`` is a folder."""


def show_passes(compiled: CompiledProgram, *, as_json: bool) -> int:
    """Print the changes of each pass."""
    from dataclasses import asdict

    from zeroir.report.passes import pass_rows, programs_after_passes
    from zeroir.report.render import render_passes

    rows = pass_rows(programs_after_passes(compiled.logical, compiled.program))
    if as_json:
        print_json({"passes": [asdict(row) for row in rows]})
    else:
        out.print(render_passes(rows))
    return 0


def print_pass(compiled: CompiledProgram) -> None:
    """Print the last pass that has run on the shown program."""
    specs = compiled.program.passes
    last = f"`{specs[-1]}`" if specs else "none yet"
    out.print(f"After pass {len(specs)}: {last}.\n")


def export(
    source: Annotated[
        str,
        Parameter(
            help="A compiled program (.zir), a checkpoint, or a folder of checkpoints, of which the newest is exported."
        ),
    ],
    /,
    *,
    format: Annotated[  # noqa: A002  the flag is called --format
        Literal[CheckpointFormat, ProgramFormat] | None,
        Parameter(
            help="Of a checkpoint, hf: a folder for Hugging Face's from_pretrained; state-dict: a file for torch.load; "
            "dcp: a folder for torch.distributed.checkpoint, with the optimizer; deepspeed: a universal checkpoint. "
            "Of a program, graphviz: ops, streams and events in DOT; memory-snapshot: for pytorch.org/memory_viz; "
            "flight-recorder: a folder with every rank's collectives, for torch's fr_trace; chrome: the simulated "
            "step, for ui.perfetto.dev. [default: hf for a checkpoint]"
        ),
    ] = None,
    output: Annotated[
        Path,
        Parameter(
            name=["-o", "--output"], help="The file or, where the format is one, the folder."
        ),
    ],
    dtype: Annotated[
        WeightDtype | None,
        Parameter(
            help="The dtype of exported weights; as-trained: FP32 where the run had FP32 masters. [default: as-trained]"
        ),
    ] = None,
    ema: Annotated[
        bool,
        Parameter(negative=(), help="Export the moving averages of the weights in their place."),
    ] = False,
    max_shard_size: Annotated[
        str | None,
        Parameter(help="The size of a file (hf) above which another begins. [default: 5GB]"),
    ] = None,
    section: Annotated[str | None, Parameter(help="Only this section (graphviz).")] = None,
    machine: Annotated[
        str | None,
        Parameter(
            help=f"The machine of the simulated step (chrome), as for `zeroir simulate`. [default: {DEFAULT_MACHINE}]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write a checkpoint in another library's format, or a compiled program as a file for an existing viewer.

    Example: zeroir export checkpoints -o out --format hf --dtype bf16

    Example: zeroir export gpt.zir --format memory-snapshot -o gpt.pickle
    """
    if section is not None and format != "graphviz":
        raise UserError("--section can be combined only with --format graphviz.")
    if machine is not None and format != "chrome":
        raise UserError("--machine can be combined only with --format chrome.")
    match format:
        case "chrome" | "memory-snapshot" | "flight-recorder" | "graphviz":
            for flag, is_given in (
                ("--dtype", dtype is not None),
                ("--ema", ema),
                ("--max-shard-size", max_shard_size is not None),
            ):
                if is_given:
                    raise UserError(f"{flag} can be combined only with the formats of checkpoints.")
            return _export_program(
                Path(source), format, output, section=section, machine=machine, as_json=as_json
            )
        case "hf" | "state-dict" | "dcp" | "deepspeed" | None:
            return _export_checkpoint(
                source,
                format,
                output,
                dtype=dtype or AS_TRAINED,
                use_ema=ema,
                max_shard_size=max_shard_size,
                as_json=as_json,
            )
        case _:
            assert_never(format)


def _export_checkpoint(
    source: str,
    format_: CheckpointFormat | None,
    output: Path,
    *,
    dtype: WeightDtype,
    use_ema: bool,
    max_shard_size: str | None,
    as_json: bool,
) -> int:
    from zeroir.convert.export import export_checkpoint, is_checkpoint
    from zeroir.ir.byte_sizes import parse_bytes

    if not is_checkpoint(source):
        if format_ is None and Path(source).is_file():
            raise UserError(
                "--format is missing: a compiled program is exported as chrome, memory-snapshot, flight-recorder or "
                "graphviz."
            )
        raise UserError(
            f"'{source}' is no checkpoint: name a folder that zeroir saved to, or the folder of one checkpoint."
        )
    chosen: CheckpointFormat = format_ or "hf"
    max_shard_bytes = MAX_SHARD_BYTES
    if max_shard_size is not None:
        if chosen != "hf":
            raise UserError("--max-shard-size can be combined only with --format hf.")
        max_shard_bytes = parse_bytes(max_shard_size)
    with progress(f"Exporting {source} …"):
        report = export_checkpoint(
            source,
            output,
            to=chosen,
            dtype=dtype,
            use_ema=use_ema,
            max_shard_bytes=max_shard_bytes,
        )
    for note in report.notes:
        err.print(note)
    if as_json:
        print_json(
            {
                "format": chosen,
                "paths": [str(output)],
                "checkpoint": report.checkpoint,
                "step": report.step,
                "notes": list(report.notes),
            }
        )
    else:
        out.print(f"Wrote {output} from step {report.step}, {report.checkpoint}.")
    return 0


def _export_program(
    program: Path,
    format_: ProgramFormat,
    output: Path,
    *,
    section: str | None,
    machine: str | None,
    as_json: bool,
) -> int:
    from zeroir.api import load_program
    from zeroir.artifact.outputs import require_writable, write_whole

    if format_ == "flight-recorder":
        _require_empty(output)
    else:
        require_writable(output, _kind(format_))
    compiled = load_program(program)
    compiled.require(section=section)
    if format_ == "flight-recorder":
        written = _write_dumps(compiled, program, output)
    else:
        content = _content(compiled, program, format_, section, machine or DEFAULT_MACHINE)
        write_whole(output, content, _kind(format_))
        written = [output]
    if as_json:
        print_json({"format": format_, "paths": [str(path) for path in written]})
    elif len(written) == 1:
        out.print(f"Wrote {written[0]}.")
    else:
        out.print(f"Wrote {len(written)} files to {output}.")
    return 0


def _content(
    compiled: CompiledProgram, path: Path, format_: FileFormat, section: str | None, machine: str
) -> bytes:
    program = compiled.program
    match format_:
        case "graphviz":
            from zeroir.report.graph import dot

            return dot(program, section=section).encode()
        case "memory-snapshot":
            from zeroir.report.memory_snapshot import memory_snapshot
            from zeroir.report.plain_pickle import dumps

            return dumps(memory_snapshot(program, source=str(path)))
        case "chrome":
            from zeroir.cost.machine import load_machine
            from zeroir.cost.simulate import simulate
            from zeroir.report.trace import simulated_trace

            simulation = simulate(program, load_machine(machine), logical=compiled.logical)
            return json.dumps(simulated_trace(program, simulation)).encode()
        case _:
            assert_never(format_)


def _kind(format_: FileFormat) -> OutputKind:
    from zeroir.artifact.outputs import GRAPH, SNAPSHOT, TIMELINE

    match format_:
        case "graphviz":
            return GRAPH
        case "memory-snapshot":
            return SNAPSHOT
        case "chrome":
            return TIMELINE
        case _:
            assert_never(format_)


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"'{folder}' is not an empty folder: every file in it would count as a rank."
        )


def _write_dumps(compiled: CompiledProgram, path: Path, folder: Path) -> list[Path]:
    """Write one file per rank, with the names that the analysis expects; all of them or none."""
    from zeroir.artifact.outputs import DUMP, write_whole
    from zeroir.report.flight_recorder import flight_recorder_dumps
    from zeroir.report.plain_pickle import dumps

    _require_empty(folder)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder '{folder}' cannot be made: {error.strerror}.") from error
    written: list[Path] = []
    try:
        for rank, dump in enumerate(flight_recorder_dumps(compiled.program, source=str(path))):
            written.append(folder / f"rank_{rank}")
            write_whole(written[-1], dumps(dump), DUMP)
    except BaseException:
        with contextlib.suppress(OSError):
            for dump_path in written:
                dump_path.unlink(missing_ok=True)
            if is_new:
                folder.rmdir()
        raise
    return written
