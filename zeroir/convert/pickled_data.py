"""Pickles as data: what a pickle describes, without making any of it.

A pickle is a program that imports modules and calls what they contain. PyTorch writes one into every file of
``torch.save`` and of ``torch.distributed.checkpoint``. This module follows the opcodes (see ``pickletools`` of the
standard library), but imports and calls nothing: where a pickle names a global, there is a ``Named``, and where it
calls one, a ``Made``. So no pickle can do more than take as much memory as a small multiple of its size. Readers give
a meaning to the few names that they know; everything else stays as it is and is never used.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from zeroir.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Named:
    """A global of a module. It is never imported."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The module and the name, as in ``torch.Size``."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, kw_only=True, eq=False)
class Made:
    """What a call would return: its function or class, its arguments, and what the pickle puts into the result."""

    function: object
    arguments: tuple[object, ...]
    keywords: object = None
    state: object = None
    items: list[object] = field(default_factory=list)
    entries: list[tuple[object, object]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path of the function; empty where no global is called."""
        return self.function.path if isinstance(self.function, Named) else ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Persistent:
    """An object outside the pickle, by its key: in a file of ``torch.save`` the bytes of a tensor."""

    key: object


class UnreadablePickleError(ValueError):
    """The bytes are not a pickle, or one with opcodes that no library in question writes."""


_LITERALS: Final = frozenset(
    (
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    )
)
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS: Final = ("PUT", "BINPUT", "LONG_BINPUT")
_GETS: Final = ("GET", "BINGET", "LONG_BINGET")
_DICTIONARIES: Final = ("collections.OrderedDict", "collections.defaultdict")


def read_pickle(data: bytes) -> object:
    """What a pickle describes.

    Returns:
        None, booleans, numbers, texts, bytes, lists, tuples, dictionaries (``collections.OrderedDict`` is one), and for
        everything else ``Named``, ``Made`` and ``Persistent``. Sets are lists.

    Raises:
        UnreadablePickleError: if it is not a well-formed pickle.
    """
    stack = _OpcodeStack()
    try:
        # It warns of backslashes in names.
        with warnings.catch_warnings(action="ignore"):
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    return stack.pop()
                stack.follow(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UnreadablePickleError(str(error) or type(error).__name__) from error
    raise UnreadablePickleError("it does not end")


class _OpcodeStack:
    """The stack and the memo of a pickle; ``marked`` are the stacks below marks."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def pop(self) -> object:
        return self.stack.pop()

    def pop_to_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def follow(self, opcode: str, argument: object) -> None:
        """Carry out one opcode."""
        if opcode in _LITERALS:
            self.stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _PUTS:
            self.memo[_index(argument)] = self.stack[-1]
        elif opcode in _GETS:
            self.stack.append(self.memo[_index(argument)])
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            if len(self.stack) < count:
                raise UnreadablePickleError("its stack is empty")
            self.stack[-count:] = [tuple(self.stack[-count:])]
        elif not self._follow_container(opcode) and not self._follow_object(opcode, argument):
            raise UnreadablePickleError(f"it has the opcode {opcode}")

    def _follow_container(self, opcode: str) -> bool:
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marked.append(self.stack)
                self.stack = []
            case "POP":
                self.pop()
            case "POP_MARK":
                self.pop_to_mark()
            case "DUP":
                self.stack.append(self.stack[-1])
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "EMPTY_TUPLE":
                self.stack.append(())
            case "EMPTY_LIST" | "EMPTY_SET":
                self.stack.append([])
            case "EMPTY_DICT":
                self.stack.append({})
            case "TUPLE":
                items = self.pop_to_mark()
                self.stack.append(tuple(items))
            case "LIST" | "FROZENSET":
                items = self.pop_to_mark()
                self.stack.append(items)
            case "DICT":
                items = self.pop_to_mark()
                self.stack.append({})
                self._put_entries(items)
            case "APPEND":
                item = self.pop()
                self._append([item])
            case "APPENDS" | "ADDITEMS":
                self._append(self.pop_to_mark())
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self._put_entries([key, value])
            case "SETITEMS":
                self._put_entries(self.pop_to_mark())
            case _:
                return False
        return True

    def _follow_object(self, opcode: str, argument: object) -> bool:
        match opcode:
            case "GLOBAL":
                module, _, name = str(argument).partition(" ")
                self.stack.append(Named(module=module, name=name))
            case "STACK_GLOBAL":
                last, first = self.pop(), self.pop()
                if not isinstance(first, str) or not isinstance(last, str):
                    raise UnreadablePickleError("a global has no name")
                self.stack.append(Named(module=first, name=last))
            case "BINPERSID":
                self.stack.append(Persistent(key=self.pop()))
            case "REDUCE" | "NEWOBJ":
                arguments, function = self.pop(), self.pop()
                self.stack.append(_called(function, arguments, None))
            case "NEWOBJ_EX":
                keywords, arguments, function = self.pop(), self.pop(), self.pop()
                self.stack.append(_called(function, arguments, keywords))
            case "BUILD":
                state = self.pop()
                target = self.stack[-1]
                if isinstance(target, Made):
                    target.state = state
            case _:
                return False
        return True

    def _append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Made):
            target.items.extend(items)
        else:
            raise UnreadablePickleError("it adds items to what is no list")

    def _put_entries(self, items: list[object]) -> None:
        target = self.stack[-1]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, dict):
            for key, value in pairs:
                target[_key(key)] = value
        elif isinstance(target, Made):
            target.entries.extend(pairs)
        else:
            raise UnreadablePickleError("it adds entries to what is no dictionary")


def _called(function: object, arguments: object, keywords: object) -> object:
    if not isinstance(arguments, tuple):
        raise UnreadablePickleError("it calls without arguments")
    made = Made(function=function, arguments=arguments, keywords=keywords)
    if made.path not in _DICTIONARIES:
        return made
    # Old Pythons gave the entries of an OrderedDict as its argument.
    first = arguments[0] if arguments else None
    pairs = first if isinstance(first, list) else []
    return {_key(pair[0]): pair[1] for pair in pairs if isinstance(pair, list | tuple)}


def _index(argument: object) -> int:
    if not isinstance(argument, int):
        raise UnreadablePickleError("an index is no number")
    return argument


def _key(value: object) -> Hashable:
    """A key of a dictionary. Tuples within tuples are refused, since hashing deep ones has no end."""
    for part in value if isinstance(value, tuple) else (value,):
        if not isinstance(part, str | int | float | bytes | Named | Made | None):
            raise UnreadablePickleError(f"a key is of the type {type(part).__name__}")
    if isinstance(value, Hashable):
        return value
    raise UnreadablePickleError("a key has no hash")


def unreadable(path: str, error: UnreadablePickleError) -> UserError:
    """The error that a file is damaged or not of its format."""
    return UserError(f"'{path}' is damaged, or not a file of torch.save: {error}.")
