"""Files of programs that no model file was compiled to."""

from __future__ import annotations

from zeroir.artifact.file import Artifact
from zeroir.ir.program import Program


def artifact_of(scheduled: Program, logical: Program) -> Artifact:
    """The contents of a file with these programs."""
    return Artifact(
        logical=logical,
        scheduled=scheduled,
        model_path="model.py",
        model_sha256="",
        torch_version="",
        zeroir_version="",
    )
