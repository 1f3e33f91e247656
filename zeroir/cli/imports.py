"""The command that turns what another library saved into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from zeroir.cli.arguments import AsJson
from zeroir.cli.console import err, out, print_json, progress
from zeroir.errors import UserError


def import_(
    source: Annotated[
        Path,
        Parameter(
            help="A file of safetensors or of torch.save; or a folder of Hugging Face, of "
            "torch.distributed.checkpoint, or of DeepSpeed's ZeRO stages 1, 2 and 3."
        ),
    ],
    /,
    *,
    output: Annotated[
        str,
        Parameter(
            name=["-o", "--output"],
            help="The folder of the checkpoint, where nothing is yet: a path, or a URL that fsspec opens.",
        ),
    ],
    rename: Annotated[
        tuple[str, ...],
        Parameter(
            help="OLD=NEW: names that begin with OLD begin with NEW instead. May be given several times; the first "
            "that fits a name counts."
        ),
    ] = (),
    weights_only: Annotated[
        bool, Parameter(negative=(), help="Leave out the optimizer, the step and the loss scale.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Write what another library saved as a checkpoint. No code of its pickles runs.

    Example: zeroir import llama/ -o checkpoints/step-00000000 --rename model.=
    """
    from dataclasses import asdict

    from zeroir.convert.import_checkpoint import import_checkpoint

    renames = [_pair(text) for text in rename]
    with progress(f"Importing {source} …"):
        report = import_checkpoint(source, output, renames=renames, weights_only=weights_only)
    for note in report.notes:
        err.print(note)
    if as_json:
        print_json(asdict(report))
    else:
        states = f", with {' and '.join(report.states)}" if report.states else ""
        out.print(
            f"Wrote {report.checkpoint} from a checkpoint of {report.format} at step {report.step}: "
            f"{report.parameters:,} parameters of {report.numel:,} elements{states}.",
        )
    return 0


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise UserError(f"--rename is '{text}', but should be OLD=NEW.")
    return old, new
