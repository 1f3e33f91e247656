"""Chooses the modules whose code runs as it is: those that the user names, or the smallest that cannot be traced."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from zeroir.errors import UserError
from zeroir.frontend.lowering.units import inside_of
from zeroir.frontend.opaque.module_results import ModuleResults
from zeroir.frontend.opaque.structure import CannotRunError, OwnCodeError

NONE: Final = "none"
_WHOLE: Final = "Or let the code of the whole model run as it is, with all parameters gathered at once: --opaque root."
ROOT: Final = "root"
"""The pattern of the model itself."""


class OwnCode(StrEnum):
    """The code around modules, as sentences call it."""

    FORWARD = "the model's own forward"
    LOSS = "the loss function"


class UntraceableError(UserError):
    """Code cannot be traced that may run as it is; ``path`` names the innermost module whose forward it is part of.

    It is None if that is unknown, or the code is not a module's, as that of a loss function. With ``is_of_gradients``
    the code calls ``backward``.
    """

    def __init__(self, text: str, path: str | None, *, is_of_gradients: bool = False) -> None:
        super().__init__(text)
        self.path = path
        self.is_of_gradients = is_of_gradients


def module_of_error(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost module of the model whose method an exception left; None if there is none."""
    # The user's frozen modules share the attributes of those that are traced.
    names = {id(vars(module)): name for name, module in model.named_modules()}
    found: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = names.get(id(vars(owner)), found)
    return found


@dataclass(slots=True)
class OpaqueChoice:
    """The choice for one model. ``option`` is that of the compilation.

    ``found`` has what was found out of modules, as ``OpaqueModules`` has it. Without the option, ``include`` adds what
    cannot be traced, and ``reasons`` has the sentence for each added module that stands first among those of its class.
    ``with_loss`` says that the loss function runs as it is, too, with the model itself. ``own_code`` is the code around
    modules that runs as it is: that of the model's own forward, or of the loss function.
    """

    option: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    found: dict[tuple[type, str], ModuleResults] = field(default_factory=dict)
    with_loss: bool = False
    own_code: OwnCode | None = None
    reason_of_own_code: str = ""
    _paths: frozenset[str] = frozenset()
    _classes: dict[str, type] = field(default_factory=dict)

    def paths_in(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the opaque modules of the model, of which none is inside another.

        Raises:
            UserError: if a pattern matches no module.
        """
        self._classes = {name: type(module) for name, module in model.named_modules() if name}
        if self.option is not None and self.option != NONE:
            self._paths = outermost(
                name for part in self.option.split(",") for name in self._matching(part.strip())
            )
        return self._paths

    def _matching(self, pattern: str) -> frozenset[str]:
        if pattern == ROOT:
            return frozenset(("",))
        names = frozenset(
            name
            for name, kind in self._classes.items()
            if fnmatchcase(name, pattern) and _has_forward(kind)
        )
        if not names:
            examples = ", ".join([n for n, kind in self._classes.items() if _has_forward(kind)][:3])
            raise UserError(
                f"--opaque {pattern} matches no module that is called; names look like {examples or 'none'}."
            )
        return names

    def include(self, error: UntraceableError | CannotRunError) -> None:
        """Choose the module of an error, or the one around it if that cannot run as it is.

        Raises:
            UserError: if the user chose the modules, or there is no submodule around the code that can.
        """
        if self.option is not None:
            if "" not in self._paths or self.with_loss or isinstance(error, CannotRunError):
                raise error from None
            self.with_loss = True
            return
        path, reason = error.path, str(error)
        if not path and self._runs_own_code(error):
            return
        # Code inside an opaque module is traced where another method than its forward is called.
        covering = next((p for p in self._paths if path and f"{path}.".startswith(f"{p}.")), None)
        if isinstance(error, CannotRunError) and path:
            alike = (why for n, why in self.reasons.items() if self._is_alike(n, error.path))
            first = next(alike, "")
            reason = f"{first} It cannot run as it is either: {error}" if first else reason
        if isinstance(error, CannotRunError) or covering is not None:
            path = self._around(covering or path)
        if not path:
            if self.own_code is not None and not isinstance(error, OwnCodeError):
                reason = self.reason_of_own_code
            raise UserError(f"{reason} {_WHOLE}") from None
        others = frozenset(n for n in self._classes if self._is_alike(n, path))
        self._paths = outermost(self._paths | others)
        known = {n: why for n, why in self.reasons.items() if n in self._paths}
        self.reasons = {path: reason} | known

    def _runs_own_code(self, error: UntraceableError | CannotRunError) -> bool:
        """Return whether an error is of code around modules that runs as it is from now on."""
        if isinstance(error, CannotRunError) or self.own_code is not None or error.is_of_gradients:
            return False
        self.own_code = OwnCode.LOSS if error.path is None else OwnCode.FORWARD
        self.reason_of_own_code = str(error)
        return True

    def _is_alike(self, name: str, other: str) -> bool:
        return self._classes[name] is self._classes[other]

    def _around(self, path: str | None) -> str | None:
        """Return the innermost submodule around one that is called."""
        while path:
            path = path.rpartition(".")[0]
            if path and _has_forward(self._classes[path]):
                return path
        return None

    def reason_of(self, path: str) -> str:
        """Return why a module was chosen; empty if the user chose it."""
        found = (why for name, why in self.reasons.items() if self._is_alike(name, path))
        return next(found, "") if path else ""

    def notes(self) -> list[str]:
        """Return a sentence for each class of modules that was chosen."""
        notes = [] if self.own_code is None else [self._note_on_own_code()]
        return notes + [
            f"The code of {_joined(self._alike(path))} runs as it is, in eager PyTorch on whole parameters, and a "
            f"second time in the backward, because it cannot be traced: {reason}"
            for path, reason in self.reasons.items()
        ]

    def _note_on_own_code(self) -> str:
        return (
            f"The code of {self.own_code} runs as it is, in eager PyTorch after the modules that it calls, and a "
            f"second time in the backward, because it cannot be traced: {self.reason_of_own_code}"
        )

    def _alike(self, path: str) -> list[str]:
        return [n for n in self._classes if n in self._paths and self._is_alike(n, path)]


def _has_forward(kind: type) -> bool:
    return getattr(kind, "forward", None) is not nn.Module.forward


def outermost(names: Iterable[str]) -> frozenset[str]:
    """Return those of the names that are not inside another one."""
    every = frozenset(names)
    inside = tuple(map(inside_of, every))
    return frozenset(n for n in every if not any(n and n.startswith(each) for each in inside))


def _joined(names: list[str]) -> str:
    first, *rest = names
    return f"{first} (and {len(rest)} more)" if rest else first
