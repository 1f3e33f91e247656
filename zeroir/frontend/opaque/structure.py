"""What a module is called with, or returns, without its tensors and without the numbers that are sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NoReturn, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroir.errors import UserError
from zeroir.frontend.source.namespaces import PLAIN


class CannotRunError(UserError):
    """The forward of a module cannot run as it is, as ``path`` names it."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


class OwnCodeError(CannotRunError):
    """Code around modules breaks a rule that code which is traced need not obey."""

    def __init__(self, text: str) -> None:
        super().__init__("", text)


class _TensorMark:
    """Where a tensor stands among the arguments or results."""


TENSOR: Final = _TensorMark()


@dataclass(frozen=True, slots=True)
class SizesMark:
    """Where sizes stand that may depend on dims: a number, or a ``torch.Size`` with ``count`` of them."""

    count: int | None = None


@dataclass(frozen=True, slots=True)
class InputMark:
    """Where an argument stands among the results, at the position ``number`` of the inputs."""

    number: int


@dataclass(frozen=True, slots=True)
class ObjectMark:
    """Where an object stands in which tensors may be, such as a cache; ``sentence`` says why the use is refused."""

    sentence: str


class AbsentObject:
    """Stands for an object that a module returns and that no program has: whatever is done with it is refused."""

    def __init__(self, path: str, sentence: str) -> None:
        object.__setattr__(self, "refusal", CannotRunError(path, sentence))

    def __getattribute__(self, _: str) -> NoReturn:
        raise object.__getattribute__(self, "refusal")

    def __bool__(self) -> NoReturn:
        raise object.__getattribute__(self, "refusal")

    __len__ = __iter__ = __bool__

    def __getitem__(self, _: object) -> NoReturn:
        raise object.__getattribute__(self, "refusal")

    __contains__ = __eq__ = __getitem__
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Arguments or results without their tensors and without the numbers that are sizes: marks stand for these."""

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]

    @property
    def sizes(self) -> int:
        """How many sizes belong to it."""
        marks = (leaf for leaf in self.leaves if isinstance(leaf, SizesMark))
        return sum(1 if mark.count is None else mark.count for mark in marks)

    def with_sizes(self, sizes: Sequence[int]) -> Structure:
        """Return the structure with these sizes."""
        remaining = iter(sizes)

        def at(leaf: object) -> object:
            if not isinstance(leaf, SizesMark):
                return leaf
            if leaf.count is None:
                return next(remaining)
            return torch.Size([next(remaining) for _ in range(leaf.count)])

        return Structure(spec=self.spec, leaves=tuple(map(at, self.leaves)))

    def filled(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        path: str = "",
        inputs: Sequence[Tensor] = (),
    ) -> object:
        """Return them with these tensors and sizes; what ``path`` returns may have objects and inputs, too."""
        remaining = iter(tensors)
        leaves = [
            next(remaining)
            if leaf is TENSOR
            else AbsentObject(path, leaf.sentence)
            if isinstance(leaf, ObjectMark)
            else inputs[leaf.number]
            if isinstance(leaf, InputMark)
            else leaf
            for leaf in self.with_sizes(sizes).leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def __str__(self) -> str:
        leaves = ["tensor" if leaf is TENSOR else repr(leaf) for leaf in self.leaves]
        return f"{self.spec} {leaves}"


def taken_apart(
    values: object,
    place: str,
    verb: str,
    *,
    may_have_objects: bool = False,
    passed: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Structure, list[Tensor], list[int]]:
    """Return arguments or results without tensors and sizes that depend on dims; then these.

    Marks stand for tensors that are arguments, of which ``passed`` has the positions by their ids.

    Raises:
        UserError: if there is an object in which tensors may be, unless they ``may_have_objects``. ``place`` and
            ``verb`` begin the sentence.
    """
    leaves, spec = pytree.tree_flatten(values)
    kept: list[object] = []
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for leaf in leaves:
        match leaf:
            case Tensor() if id(leaf) in passed:
                kept.append(InputMark(passed[id(leaf)]))
            case Tensor():
                tensors.append(leaf)
                kept.append(TENSOR)
            case torch.SymInt():
                sizes.append(cast("int", leaf))
                kept.append(SizesMark())
            case torch.Size() if any(isinstance(size, torch.SymInt) for size in leaf):
                sizes += leaf
                kept.append(SizesMark(len(leaf)))
            case torch.Size():
                kept.append(leaf)
            case _ if isinstance(leaf, PLAIN):
                kept.append(leaf)
            case _:
                rest = (
                    f"{verb} a {type(leaf).__name__}, but only tensors, numbers and texts, in tuples, lists, dicts and "
                    "dataclasses, go into and out of it."
                )
                if not may_have_objects:
                    raise UserError(f"{place} {rest}")
                kept.append(ObjectMark(f"{place} {rest}"))
    return Structure(spec=spec, leaves=tuple(kept)), tensors, sizes


def common_structure(
    structures: Sequence[Structure], place: str
) -> tuple[Structure, list[list[int]]]:
    """Return the structure of several results, with marks where numbers differ, and these numbers of each.

    Raises:
        UserError: if they differ in something else.
    """
    first = structures[0]
    leaves: list[object] = []
    numbers: list[list[int]] = [[] for _ in structures]
    for every in zip(*(each.leaves for each in structures), strict=False):
        if all(repr(leaf) == repr(every[0]) for leaf in every):
            leaves.append(every[0])
        elif all(type(leaf) is int for leaf in every):
            leaves.append(SizesMark())
            for of_point, leaf in zip(numbers, every, strict=True):
                of_point.append(leaf)
        elif all(isinstance(leaf, torch.Size) and len(leaf) == len(every[0]) for leaf in every):
            leaves.append(SizesMark(len(every[0])))
            for of_point, leaf in zip(numbers, every, strict=True):
                of_point.extend(leaf)
        else:
            break
    other = next((each for each in structures if each.spec != first.spec), structures[-1])
    if other.spec != first.spec or len(leaves) < len(first.leaves):
        raise UserError(f"{place} returns {first} for batches of one size and {other} for others.")
    return Structure(spec=first.spec, leaves=tuple(leaves)), numbers
