"""How a user names a model: a file or a module, and the factory in it that builds the model.

``gpt.py``, ``gpt.py:build``, ``models.gpt:build`` and ``models.gpt:build(layers=12, width=768)`` are model specs.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from zeroir.errors import UserError

__all__ = ["Factory", "ModelSpec"]

_SPEC: Final = re.compile(r"(?P<place>.+?):(?P<factory>[^\W\d]\w*(\(.*)?)", re.DOTALL)
_MOST_ARGUMENTS_TEXT: Final = 10_000


def _literal(node: ast.expr) -> object:
    """Return the value of a literal that prints as a literal, which infinity does not."""
    value: object = ast.literal_eval(node)
    ast.literal_eval(repr(value))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """The function that builds the model, with the arguments that it is called with: Python literals."""

    name: str = "model"
    positional: tuple[object, ...] = ()
    keywords: tuple[tuple[str, object], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``text`` writes.

        Raises:
            UserError: where the text is neither a name nor a call with literals.
        """
        if text.isidentifier():
            return cls(name=text)
        try:
            if len(text) > _MOST_ARGUMENTS_TEXT:
                raise ValueError
            match ast.parse(text, mode="eval").body:
                case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                    pass
                case _:
                    raise ValueError
            names = [keyword.arg for keyword in keywords]
            if None in names or len(names) > len(set(names)):
                raise ValueError
            return cls(
                name=name,
                positional=tuple(map(_literal, args)),
                keywords=tuple((str(k.arg), _literal(k.value)) for k in keywords),
            )
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise UserError(
                f"'{text:.200}' does not name a factory: write a function of the model file, such as build, or a call "
                "of it with numbers, texts in quotes, True, False, None, or lists of them, such as "
                "'build(layers=12, name=\"tiny\")'."
            ) from None

    @property
    def text(self) -> str:
        """The name, and the arguments if there are any: ``build`` or ``build(layers=12)``."""
        return self.call if self.positional or self.keywords else self.name

    @property
    def call(self) -> str:
        """The call in Python: ``build()`` or ``build(layers=12)``."""
        arguments = [repr(value) for value in self.positional]
        arguments += [f"{name}={value!r}" for name, value in self.keywords]
        return f"{self.name}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The file or module of a model, as the user wrote it, and its factory; None where the user names none."""

    place: str
    factory: Factory | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``PLACE`` or ``PLACE:FACTORY``.

        Raises:
            UserError: where the arguments of the factory cannot be read.
        """
        spec = _SPEC.fullmatch(text)
        if spec is None:
            return cls(place=text)
        return cls(place=spec["place"], factory=Factory.parse(spec["factory"]))

    @property
    def is_module(self) -> bool:
        """Whether the place names a module, such as ``models.gpt``: it looks like one, and no file is there."""
        if self.place.endswith(".py") or Path(self.place).exists():
            return False
        return all(part.isidentifier() for part in self.place.split("."))

    @property
    def stem(self) -> str:
        """The name of the file or module, without folders, packages and the ending."""
        return self.place.rpartition(".")[2] if self.is_module else Path(self.place).stem
