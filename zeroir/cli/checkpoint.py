"""``zeroir checkpoint``: what checkpoints contain, whether they are whole, and how two differ."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from zeroir.cli.arguments import AsJson
from zeroir.cli.console import out, print_json, progress

CheckpointPath = Annotated[
    str, Parameter(help="The folder of one checkpoint, such as ckpts/step-00000100, or its URL.")
]

app = App(name="checkpoint", help="List, show, verify and compare checkpoints.")


@app.command
def ls(
    folder: Annotated[
        str, Parameter(help="The folder of checkpoints that `zeroir run --save` was given.")
    ],
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """List the checkpoints of a folder, newest first, with their steps, sizes and metrics.

    Manifests are read and the sizes of files are compared; `zeroir checkpoint verify` reads everything.

    Example: zeroir checkpoint ls ckpts
    """
    from zeroir.report.checkpoints import checkpoints_json, list_checkpoints, render_checkpoints

    checkpoints = list_checkpoints(folder)
    if as_json:
        print_json(checkpoints_json(checkpoints))
    else:
        out.print(render_checkpoints(checkpoints))
    return 0


@app.command
def show(
    path: Annotated[
        str,
        Parameter(
            help="The folder of one checkpoint, or of several, of which the newest is shown, or its URL."
        ),
    ],
    /,
    *,
    tensors: Annotated[
        bool,
        Parameter(negative=(), help="Print every parameter, buffer, scalar and setting, too."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show what a checkpoint contains, and the program and job that saved it.

    Example: zeroir checkpoint show ckpts/step-00000100 --tensors
    """
    from zeroir.checkpoint.damage import checkpoints_at
    from zeroir.checkpoint.reading import read_manifest
    from zeroir.report.checkpoints import render_manifest

    checkpoint = checkpoints_at(path)[0]
    manifest = read_manifest(checkpoint)
    if as_json:
        print_json({"path": checkpoint, **manifest.model_dump(mode="json")})
    else:
        out.print(render_manifest(checkpoint, manifest, has_tensors=tensors))
    return 0


@app.command
def verify(
    path: Annotated[str, Parameter(help="The folder of one checkpoint or of several, or its URL.")],
    /,
    *,
    as_json: AsJson = False,
) -> int:
    """Compare every byte with its checksum; exit 1 and name the file and tensor of each damage, if there is one.

    Example: zeroir checkpoint verify ckpts/step-00000100
    """
    from zeroir.checkpoint.damage import checkpoints_at, verify_checkpoint
    from zeroir.report.checkpoints import render_verification, verification_json

    verifications = []
    for each in checkpoints_at(path):
        with progress(f"Verifying {each} …"):
            verification = verify_checkpoint(each)
        if not as_json:
            out.print(render_verification(verification))
        verifications.append(verification)
    is_whole = not any(verification.damages for verification in verifications)
    if as_json:
        print_json(
            {
                "is_whole": is_whole,
                "checkpoints": [verification_json(each) for each in verifications],
            }
        )
    return 0 if is_whole else 1


@app.command
def diff(
    first: CheckpointPath,
    second: CheckpointPath,
    /,
    *,
    exit_code: Annotated[
        bool, Parameter(negative=(), help="Exit with 1 if the checkpoints differ.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints tensor by tensor: the norm of the difference, and the largest change of an element.

    Stages, ranks, units and precisions may differ: parameters are compared by name.

    Example: zeroir checkpoint diff ckpts/step-00000100 ckpts/step-00000200
    """
    from zeroir.convert.compare import compare
    from zeroir.report.checkpoint_diff import comparison_json, render_comparison

    with progress("Comparing …"):
        comparison = compare(first, second)
    if as_json:
        print_json(comparison_json(comparison))
    else:
        out.print(render_comparison(comparison, first, second))
    return 1 if exit_code and not comparison.is_equal else 0
