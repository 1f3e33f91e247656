"""A model file of the repository is captured once a process: a capture takes longer than all passes and proofs.

Whatever is made of a capture (units, segments, the program) is made anew each time. That capturing again gives the same
is what ``tests/frontend/test_structure.py`` and ``test_block_reuse.py`` say, which ask the frontend itself.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from zeroir.config.precision import FloatName
from zeroir.config.shapes import BatchShapes
from zeroir.frontend.capture.capture import capture
from zeroir.frontend.capture.captured_model import CapturedModel
from zeroir.frontend.lowering import tracing
from zeroir.frontend.source.entry import load_model_file
from zeroir.frontend.source.source import ModelSource
from zeroir.torch_ops.followed_numbers import FollowedNumbers

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "examples", ROOT / "tests" / "support" / "models")
"""Of model files that make the same model whenever they are asked."""


def captured(
    model_file: ModelSource,
    precision: FloatName,
    keep_fp32: Sequence[str],
    *,
    evaluate: bool = True,
    outputs: Sequence[str] = (),
    shapes: BatchShapes = MappingProxyType({}),
    numbers: FollowedNumbers | None = None,
    opaque: str | None = None,
    ranks: int = 1,
    device: str = "cpu",
) -> CapturedModel:
    """What the frontend's ``capture`` returns; for a file of the repository, what it returned before."""
    file = model_file.file
    path = None if file is None else file.path.resolve()
    is_plain = opaque is None and (numbers is None or not numbers.values)
    is_plain = is_plain and not model_file.classes
    if file is None or path is None or path.parent not in FOLDERS or not is_plain:
        return capture(
            model_file,
            precision,
            keep_fp32,
            evaluate=evaluate,
            outputs=outputs,
            shapes=shapes,
            numbers=numbers,
            opaque=opaque,
            ranks=ranks,
            device=device,
        )
    # The digest, lest an edited file is taken for what it was.
    spec = f"{path}:{file.factory}"
    more = tuple(keep_fp32), evaluate, tuple(outputs), tuple(shapes.items()), device
    made = _captured(spec, file.sha256, precision, *more, 1)
    # Few models depend on the number of ranks.
    if made.ranks in (None, ranks):
        return made
    return _captured(spec, file.sha256, precision, *more, ranks)


@lru_cache(maxsize=64)
def _captured(
    spec: str,
    _sha256: str,
    precision: FloatName,
    keep_fp32: tuple[str, ...],
    evaluate: bool,
    outputs: tuple[str, ...],
    shapes: tuple[tuple[str, tuple[int | None, ...]], ...],
    device: str,
    ranks: int,
) -> CapturedModel:
    made = capture(
        load_model_file(spec),
        precision,
        keep_fp32,
        evaluate=evaluate,
        outputs=outputs,
        shapes=dict(shapes),
        ranks=ranks,
        device=device,
    )
    # It stays, and has so many objects that each later collection would take a tenth of a second for it.
    gc.collect()
    gc.freeze()
    return made


def share() -> None:
    """Let whatever compiles in this process take its captures from here."""
    setattr(tracing, "capture", captured)  # noqa: B010 - a plain assignment is none of an export
