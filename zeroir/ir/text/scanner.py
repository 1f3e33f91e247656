"""A cursor over the text, and the error that points at where it stopped.

There are no tokens: the grammar always determines what may come next, so each reader is one regular expression matched
at the cursor, including spaces. Newlines count, because an item is a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Final, NoReturn, TypeVar

from zeroir.errors import UserError
from zeroir.ir.size_text import SIZE_TEXT, UnknownDimError, parse_size
from zeroir.ir.sizes import Dim
from zeroir.ir.text.lexical import BARE_NAME, BARE_WORD, FLOAT, INTEGER, STRING

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

_SPACES: Final = re.compile(r"[ \t]*")
_LINE_END: Final = re.compile(
    r"[ \t]*(?://[^\n]*)?(?:\n|\Z)(?:[ \t]*(?://[^\n]*)?\n)*(?:[ \t]*(?://[^\n]*)?\Z)?"
)
_BLANK: Final = re.compile(r"(?:[ \t]*(?://[^\n]*)?\n)*")
_AT_END: Final = re.compile(r"[ \t]*(?://[^\n]*)?\Z")
_NAME: Final = re.compile(rf"[ \t]*(?:({BARE_NAME})|({STRING}))")
_WORD: Final = re.compile(rf"[ \t]*(?:({BARE_WORD})|({STRING}))")
_STRING: Final = re.compile(rf"[ \t]*({STRING})")
_INTEGER: Final = re.compile(rf"[ \t]*({INTEGER})(?![A-Za-z0-9_.])")
_SIZE: Final = re.compile(rf"[ \t]*({SIZE_TEXT})(?![A-Za-z0-9_.])")
_FLOAT: Final = re.compile(rf"[ \t]*({FLOAT})")


class ParseError(UserError):
    """The text is not a program.

    ``line`` and ``column`` count from 1; ``expected`` says what was possible there.
    """

    def __init__(self, text: str, position: int, expected: str) -> None:
        start = text.rfind("\n", 0, position) + 1
        stop = text.find("\n", position)
        self.line = text.count("\n", 0, position) + 1
        self.column = position - start + 1
        self.expected = expected
        self.text_line = text[start : stop if stop >= 0 else len(text)].rstrip("\r")
        indent = re.sub(r"[^\t]", " ", text[start:position])
        shown, indent = _window(self.text_line, indent)
        super().__init__(f"line {self.line}, column {self.column}: {expected}\n{shown}\n{indent}^")


def _window(line: str, indent: str, width: int = 160) -> tuple[str, str]:
    """Return the part of a long line around the caret."""
    if len(line) <= width:
        return line, indent
    start = max(0, len(indent) - width // 2)
    head, tail = "…" if start else "", "…" if start + width < len(line) else ""
    return head + line[start : start + width] + tail, " " * len(head) + indent[start:]


class Scanner:
    """The cursor. Each reader skips spaces, and raises :class:`ParseError` if the text does not match.

    ``dims`` are those that the lines so far have declared, by name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.dims: dict[str, Dim] = {}

    # --------------------------------------------------------------------------------------- errors

    def fail(self, expected: str, position: int | None = None) -> NoReturn:
        """Raise the :meth:`error`."""
        raise self.error(expected, position)

    def error(self, expected: str, position: int | None = None) -> ParseError:
        """Return an error at ``position``, or at the next character that is not a space."""
        return ParseError(self.text, self.here() if position is None else position, expected)

    def here(self) -> int:
        """Return the position of the next character that is not a space."""
        match = _SPACES.match(self.text, self.position)
        return self.position if match is None else match.end()

    # ------------------------------------------------------------------------------------ structure

    def accept(self, literal: str) -> bool:
        """Skip ``literal`` if it is next; return whether it was."""
        position = self.here()
        if self.text.startswith(literal, position):
            self.position = position + len(literal)
            return True
        return False

    def expect(self, literal: str, expected: str | None = None) -> None:
        """Skip ``literal``."""
        if not self.accept(literal):
            self.fail(expected or f"expected '{literal}'.")

    def accept_keyword(self, keyword: str) -> bool:
        """Skip ``keyword`` if it is the next whole name; return whether it was."""
        match = _NAME.match(self.text, self.position)
        if match is None or match[1] != keyword:
            return False
        self.position = match.end()
        return True

    def end_line(self) -> None:
        """Skip a comment, the end of the line and blank lines."""
        match = _LINE_END.match(self.text, self.position)
        if match is None:
            self.fail("expected the end of the line.")
        self.position = match.end()

    def skip_blank_lines(self) -> None:
        """Skip blank lines and comments."""
        match = _BLANK.match(self.text, self.position)
        if match is not None:
            self.position = match.end()

    @property
    def is_at_line_end(self) -> bool:
        """Whether only a comment is left of the line."""
        position = self.here()
        return self.text[position : position + 1] in ("", "\n") or self.text.startswith(
            "//", position
        )

    @property
    def is_at_end(self) -> bool:
        """Whether only a comment is left."""
        return _AT_END.match(self.text, self.position) is not None

    def several(
        self, read: Callable[[], T], opening: str = "(", closing: str = ")"
    ) -> tuple[T, ...]:
        """Read items between brackets, separated by commas."""
        self.expect(opening)
        if self.accept(closing):
            return ()
        items = self._separated(read)
        self.expect(closing, f"expected ',' or '{closing}'.")
        return items

    def separated(self, read: Callable[[], T], beginning: str) -> tuple[T, ...]:
        """Read items separated by commas, none if the next text does not start with ``beginning``."""
        return self._separated(read) if self.text.startswith(beginning, self.here()) else ()

    def _separated(self, read: Callable[[], T]) -> tuple[T, ...]:
        items = [read()]
        while self.accept(","):
            items.append(read())
        return tuple(items)

    def lines(self, read: Callable[[], T]) -> tuple[T, ...]:
        """Read items between braces, a line each."""
        self.expect("{")
        self.end_line()
        items: list[T] = []
        while not self.accept("}"):
            items.append(read())
            self.end_line()
        return tuple(items)

    def between(self, opening: str, closing: str, read: Callable[[], T]) -> T:
        """Read an item between brackets."""
        self.expect(opening)
        item = read()
        self.expect(closing)
        return item

    def attribute(self, key: str, read: Callable[[], T]) -> T:
        """Read ``key=value``."""
        self.expect(key + "=", f"expected '{key}=…'.")
        return read()

    def optional(self, key: str, read: Callable[[], T], default: T) -> T:
        """Read ``key=value``; return ``default`` where this attribute is not next."""
        return read() if self.accept(key + "=") else default

    # ---------------------------------------------------------------------------------------- atoms

    def name(self, what: str = "a name") -> str:
        """Read a bare or quoted name."""
        match = _NAME.match(self.text, self.position)
        if match is None:
            self.fail(f"expected {what}.")
        self.position = match.end()
        return match[1] or self.unquote(match[2], match.start(2))

    def word(self, what: str) -> str:
        """Read a bare or quoted word: an option's value or a pass spec."""
        match = _WORD.match(self.text, self.position)
        if match is None:
            self.fail(f"expected {what}.")
        self.position = match.end()
        return match[1] or self.unquote(match[2], match.start(2))

    def string(self, what: str = "a string in double quotes") -> str:
        """Read a quoted string."""
        match = _STRING.match(self.text, self.position)
        if match is None:
            self.fail(f"expected {what}.")
        self.position = match.end()
        return self.unquote(match[1], match.start(1))

    def unquote(self, literal: str, position: int) -> str:
        """Return the text of a string literal that is at ``position``."""
        try:
            text = json.loads(literal)
        except ValueError:
            self.fail("expected a string in double quotes with JSON's escapes.", position)
        if not isinstance(text, str):
            self.fail("expected a string in double quotes.", position)
        return text

    def integer(self) -> int:
        """Read an integer."""
        match = _INTEGER.match(self.text, self.position)
        if match is None:
            self.fail("expected an integer.")
        self.position = match.end()
        return int(match[1])

    def size(self) -> int:
        """Read an integer, or a polynomial of dims such as ``batch*length*64``."""
        match = _SIZE.match(self.text, self.position) if self.dims else None
        if match is None:
            return self.integer()
        self.position = match.end()
        return self.size_of(match[1], match.start(1))

    def size_of(self, text: str, position: int) -> int:
        """Return the size that a text at a position spells."""
        try:
            size = parse_size(text, self.dims)
        except UnknownDimError as error:
            self.fail(f"expected a 'dim {error}' line above, since a size names it.", position)
        except UserError as error:
            self.fail(str(error), position)
        if size is None:
            self.fail("expected a size such as 'batch*length*64'.", position)
        return size

    def range(self) -> tuple[int, int]:
        """Read two sizes with a colon between them."""
        start = self.size()
        self.expect(":")
        return start, self.size()

    def float(self) -> float:
        """Read a float, also ``inf``, ``-inf`` and ``nan``."""
        match = _FLOAT.match(self.text, self.position)
        if match is None:
            self.fail("expected a number.")
        self.position = match.end()
        return float(match[1])

    def member(self, kind: type[E], what: str) -> E:
        """Read a member of an enumeration, by its value."""
        position = self.here()
        spelling = self.name(what)
        for member in kind:
            if member.value == spelling:
                return member
        values = ", ".join(str(member.value) for member in kind)
        raise self.error(f"expected {what}, one of {values}.", position)

    def sigil_name(self, sigil: str, what: str) -> str:
        """Read a name right after ``sigil``: ``%buffer``, ``@segment``, ``!event``, ``#symbol``."""
        if not self.accept(sigil):
            self.fail(f"expected {what}.")
        if self.text[self.position : self.position + 1].isspace():
            self.fail(f"expected a name right after '{sigil}'.", self.position)
        return self.name(f"a name right after '{sigil}'")
