"""The model that a program was compiled from: its file is found, compared with the program, and executed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.artifact import Artifact
from zeroir.config.model_spec import Factory
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.frontend.source.entry import ModelText
    from zeroir.frontend.source.module_source import FrozenModules
    from zeroir.frontend.source.source import Model, ModelSource


def source_for_engine(
    artifact: Artifact,
    home: Path | None,
    source: ModelSource | None,
    model: Model | None,
    frozen: FrozenModules | None = None,
    *,
    allow_model_change: bool,
) -> ModelSource:
    """Return the source of an engine's values: ``model`` with ``frozen``, or else what the program was compiled from.

    ``home`` is the file that the program was read from, and ``source`` the module or function that it was compiled from
    in this process.

    Raises:
        UserError: in the cases of ``load_model``.
    """
    from zeroir.frontend.source.module_source import source_of

    if frozen is not None and (model is None or isinstance(model, str | Path)):
        raise UserError(
            "engine(frozen=...) has frozen modules beside a module: pass that as model=, too."
        )
    if model is None and source is not None:
        return source
    if model is None or isinstance(model, str | Path):
        return load_model(artifact, home, model=model, allow_model_change=allow_model_change)
    return source_of(model, None, None, None, frozen)


def load_model(
    artifact: Artifact,
    home: Path | None = None,
    *,
    model: str | Path | None = None,
    allow_model_change: bool = False,
) -> ModelSource:
    """Execute the model file that a program was compiled from, or the file ``model``, and return its functions.

    Raises:
        UserError: if the file is missing, or if it or a module that it imports has changed and ``allow_model_change``
            is False. Nothing is executed then.
    """
    from zeroir.frontend.source.entry import read_model_file, run_model_file

    if not artifact.has_model_file:
        raise UserError(
            f"The program was compiled from {artifact.model_path}, not from a model file: load and run it in Python, "
            "with zeroir.load(path).engine(model=...)."
        )
    path = find_model(artifact, home) if model is None else model
    text = read_model_file(str(path), Factory.parse(artifact.model_factory))
    changed = None if allow_model_change else change_of(text, artifact)
    if changed is not None:
        raise UserError(
            f"{changed} since the program was compiled from it: compile it again, or pass "
            "--allow-model-change if the change leaves the computation alone."
        )
    return run_model_file(text)


def find_model(artifact: Artifact, home: Path | None) -> Path:
    """Find the model file: by its path at compilation, relative to here or a folder above the program, or next to it.

    If several files exist, the one with the right contents is preferred. The path in a program file is followed only if
    it is relative and has no ``..``, so that a program file cannot make arbitrary files execute.

    Raises:
        UserError: if no such file exists.
    """
    named = Path(artifact.model_path)
    is_followed = home is None or not (named.is_absolute() or ".." in named.parts)
    candidates = [named] if is_followed else []
    if home is not None:
        if is_followed:
            candidates += [folder / named for folder in home.resolve().parents]
        candidates.append(home.parent / named.name)
    files = [candidate for candidate in candidates if candidate.is_file()]
    for file in files:
        if hashlib.sha256(file.read_bytes()).hexdigest() == artifact.model_sha256:
            return file
    if files:
        return files[0]
    if not is_followed:
        raise UserError(
            f"The program was compiled from {named}; a path that is absolute or leads up is not followed unless you "
            f"name it, and there is no {named.name} beside {home}: pass --model {named} if you trust that file."
        )
    beside = "" if home is None else f" nor beside {home}"
    raise UserError(
        f"The model file {named} that the program was compiled from is not here{beside}: "
        "say with --model where it is."
    )


def change_of(text: ModelText, artifact: Artifact) -> str | None:
    """Return a phrase about a change of the model file or of a module that it imports; None without one."""
    if text.sha256 != artifact.model_sha256:
        return f"{text.path} changed"
    if artifact.model_imports is None:
        return None
    compiled = dict(artifact.model_imports)
    current = text.imports(compiled)
    for name in sorted({*compiled, *current}):
        if name not in current:
            return f"The module {name}, which {text.path} imports, was removed"
        if name not in compiled:
            return f"The module {name}, which {text.path} imports, was added"
        if current[name] != compiled[name]:
            return f"The module {name}, which {text.path} imports, changed"
    return None
