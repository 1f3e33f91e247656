"""The command that measures a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import (
    At,
    ProgramFile,
    Ranks,
    SizesHistogram,
)
from zeroir.cli.console import out, print_json
from zeroir.cli.option_groups import ProfileParameters
from zeroir.config.table import arguments_of
from zeroir.errors import UserError


def profile(
    program: ProgramFile,
    /,
    *,
    output: Annotated[
        Path, Parameter(name=["-o", "--output"], help="The machine file to write (.toml).")
    ],
    nproc: Ranks = None,
    at: At = None,
    histogram: SizesHistogram = None,
    options: Annotated[ProfileParameters | None, Parameter(name="*")] = None,
) -> int:
    """Measure the segments, collectives and other ops of a program on all ranks, and write a machine file.

    Example: zeroir profile gpt.zir --nproc 2 -o here.toml
    """
    from zeroir import artifact
    from zeroir.api.compiling import load_program
    from zeroir.api.running.job import is_rank_of_job, launch
    from zeroir.api.search.histogram import (
        BATCHES,
        counts_for,
        mean_sizes,
        require_no_sizes,
    )
    from zeroir.api.search.profile import profile_program
    from zeroir.api.search.profile_options import ProfileOptions
    from zeroir.artifact.outputs import MACHINE, require_writable
    from zeroir.config.shapes import values_given, values_text
    from zeroir.cost.histogram import mean_step
    from zeroir.ir.byte_sizes import format_bytes
    from zeroir.report.costs import format_seconds
    from zeroir.report.mean_step import mean_text

    given = {} if options is None else options.given
    made = ProfileOptions.from_flat(given)
    is_rank = is_rank_of_job(nproc)
    if not is_rank or os.environ["RANK"] == "0":
        require_writable(output, MACHINE)
        if output.suffix != ".toml":
            raise UserError(f"The name of a machine file must end in .toml, unlike '{output}'.")
    if made.disk is not None and not made.disk.is_dir():
        raise UserError(f"'{made.disk}' is no folder: name one on the disk that is to be measured.")
    require_no_sizes(histogram, at)
    sizes: Mapping[str, int] | str | None = at
    counted = None
    if histogram is not None:
        compiled = load_program(program)
        is_measured = histogram == BATCHES
        counts = counts_for(
            compiled,
            histogram,
            made.model if is_measured else None,
            allow_model_change=made.allow_model_change and is_measured,
        )
        counted = compiled.program, counts
        sizes = mean_sizes(*counted)
    if at is not None and not is_rank:
        values_given(artifact.load(program).scheduled, at)
    if nproc is not None and not is_rank:
        arguments = ["profile", str(program), "--output", str(output)]
        arguments += [] if histogram is None else ["--histogram", histogram]
        arguments += [] if at is None else ["--at", at]
        return launch(nproc, [*arguments, *arguments_of(given, ProfileOptions.rows())])
    result = profile_program(program, output, made, sizes)
    if result is None:
        return 0
    mean = None
    if counted is not None:
        mean = mean_step(counted[0], result.machine, counted[1])
    if made.as_json:
        print_json({**result.to_json(), **({} if mean is None else {"mean": asdict(mean)})})
        return 0
    if result.at:
        out.print(f"batches    {values_text(result.at)}")
    ratio = result.predicted_s / result.step_s - 1
    noise = (
        "no noise floor: one round" if result.noise is None else f"noise floor {result.noise:.1%}"
    )
    out.print(
        f"step       {format_seconds(result.step_s)} measured ({noise}), "
        f"{format_seconds(result.predicted_s)} predicted ({ratio:+.1%})"
    )
    out.print(
        f"measured   {len(result.machine.segments)} segments, {len(result.machine.collectives)} kinds of collectives, "
        f"{len(result.machine.ops)} of other ops, {format_seconds(result.machine.host.issue_s.value)} to issue an op"
    )
    host = result.host
    out.print(
        f"host       {format_bytes(round(host.to_device_bytes_per_s))}/s to the device, "
        f"{format_bytes(round(host.to_host_bytes_per_s))}/s from it, "
        f"{format_bytes(round(host.update_bytes_per_s))}/s in an update, on each rank",
    )
    if result.disk is not None:
        out.print(
            f"disk       {format_bytes(round(result.disk.read_bytes_per_s))}/s read, "
            f"{format_bytes(round(result.disk.write_bytes_per_s))}/s written, on each rank",
        )
    if mean is not None:
        out.print(f"mean step  {mean_text(mean)}")
    out.print(f"Wrote {output}.")
    return 0
