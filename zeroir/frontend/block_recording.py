"""Run a model once under plain fake tensors and write down what each call of a repeated block does.

A block is a child of a list or ``Sequential`` whose class stands there repeatedly. Its calls are compared by their
tapes, not by their code: blocks that depend on their place, on caches or on counters have tapes of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroir.frontend._torch_private import are_functions_transformed
from zeroir.frontend.block_calls import Kind, Ref, Step, Tape, UnfitError, kind_of, mapped
from zeroir.torch_ops.neutral import NeutralOps

Function = Callable[..., object]


class Watcher(Protocol):
    """What is told when the call of a block begins and ends."""

    def enter(self, block: str) -> None:
        """A block's forward begins."""

    def leave(self, block: str) -> None:
        """It has ended, and no hook of the block has seen its result yet."""


@dataclass(slots=True)
class Blocks:
    """The blocks of one model, and who watches them at the moment."""

    names: tuple[str, ...]
    watcher: Watcher | None = None

    def follow(self, model: nn.Module) -> None:
        """Install the hooks, next to the forwards themselves: the blocks' other hooks belong to what is outside."""
        for name in self.names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._entering(name))
            block.register_forward_hook(self._leaving(name), prepend=True)

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Tell ``watcher``."""
        self.watcher = watcher
        try:
            yield
        finally:
            self.watcher = None

    def _entering(self, name: str) -> Callable[[nn.Module, object], None]:
        def enter(_: nn.Module, __: object) -> None:
            if self.watcher is not None:
                self.watcher.enter(name)

        return enter

    def _leaving(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def leave(_: nn.Module, __: object, ___: object) -> None:
            if self.watcher is not None:
                self.watcher.leave(name)

        return leave


@dataclass(slots=True)
class Recording:
    """One call of a block. Without a tape it did something that tapes do not hold.

    ``values`` are the tensors that it made, by number; ``is_last_user`` says of each tensor from outside whether
    nothing uses it after the call, ``is_leaf`` whether it is a parameter as it stands or has no gradient.
    """

    block: str
    tape: Tape | None
    values: list[Tensor]
    is_last_user: list[bool]
    is_leaf: list[bool]


@dataclass(slots=True)
class _Open:
    """A recording in the making."""

    block: str
    sites: int
    steps: list[Step] = field(default_factory=list)
    outside: list[Kind] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    made: list[Kind] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    sites_after: int = 0
    end: int = 0
    is_fit: bool = True


class Recorder(TorchFunctionMode):
    """A mode that records the calls of blocks; ``known`` are the tensors that exist when the forward begins."""

    def __init__(self, neutral: NeutralOps, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._neutral = neutral
        # Alive for as long as the recorder, so that no two of them share an id.
        self._known = {id(tensor): tensor for tensor in known}
        self._makers: dict[int, tuple[_Open, int]] = {}
        self._last_use: dict[int, int] = {}
        self._clock = 0
        self._depth = 0
        self._found: list[_Open] = []
        self._open: _Open | None = None

    def recordings(self) -> list[Recording]:
        """The calls of blocks in order, once the forward has ended."""
        return [self._finished(item) for item in self._found]

    def enter(self, block: str) -> None:
        """A block's forward begins."""
        if self._open is not None:
            self._open.is_fit = False
            return
        self._open = _Open(block, self._neutral.sites)
        self._open.is_fit = is_ordinary()
        self._found.append(self._open)

    def leave(self, block: str) -> None:
        """A block's forward has ended."""
        recording = self._open
        if recording is None or recording.block != block:
            return
        self._open = None
        recording.sites_after = self._neutral.sites
        recording.end = self._clock
        with torch._C.DisableTorchFunction():
            versions = [tensor._version for tensor in recording.tensors]
        # What changes a tensor from outside in place is no function of it.
        recording.is_fit &= versions == recording.versions

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` and write it down."""
        given = dict(kwargs or {})
        self._clock += 1
        recording = self._open
        step = None if recording is None else self._begun(recording, func, args, given)
        self._depth += 1
        try:
            result = func(*args, **given)
        finally:
            self._depth -= 1
        if recording is not None and step is not None:
            self._complete(recording, step, result)
        self._note_uses(result, args, given)
        return result

    @contextmanager
    def own_functions(self) -> Iterator[None]:
        """See to it that a user's own autograd function, which is no torch function, ends a recording."""
        original = inspect.getattr_static(torch.autograd.Function, "apply").__func__

        def apply(cls: type, /, *args: object, **kwargs: object) -> object:
            if self._depth == 0 and self._open is not None:
                self._open.is_fit = False
            return original(cls, *args, **kwargs)

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def _begun(
        self, recording: _Open, func: Function, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Step | None:
        """A step without its result; None, and the recording is over, where there can be none."""

        def numbered(value: object) -> object:
            return mapped(value, lambda tensor: self._used(recording, tensor))

        if not recording.is_fit:
            return None
        try:
            taken = tuple(numbered(arg) for arg in args)
            named = {key: numbered(arg) for key, arg in kwargs.items()}
        except UnfitError:
            recording.is_fit = False
            return None
        if not is_ordinary() or getattr(func, "__name__", "") == "__set__":
            recording.is_fit = False
            return None
        return Step(func, taken, named, None, torch.is_grad_enabled())

    def _complete(self, recording: _Open, step: Step, result: object) -> None:
        try:
            numbered = mapped(result, lambda tensor: self._made(recording, tensor))
        except UnfitError:
            recording.is_fit = False
        else:
            recording.steps.append(replace(step, result=numbered))

    def _used(self, recording: _Open, tensor: Tensor) -> Ref:
        number = recording.numbers.get(id(tensor))
        if number is not None:
            return Ref(number)
        if id(tensor) not in self._known:
            raise UnfitError("a tensor from nowhere")
        kind = kind_of(tensor)
        if kind.offset != 0:
            raise UnfitError("a part of a tensor from outside")
        number = recording.numbers[id(tensor)] = -1 - len(recording.outside)
        recording.outside.append(kind)
        recording.tensors.append(tensor)
        with torch._C.DisableTorchFunction():
            recording.versions.append(tensor._version)
        return Ref(number)

    def _made(self, recording: _Open, tensor: Tensor) -> Ref:
        number = recording.numbers.get(id(tensor))
        if number is None:
            if id(tensor) in self._known:
                raise UnfitError("a tensor from outside that is no argument")
            number = recording.numbers[id(tensor)] = len(recording.values)
            recording.made.append(kind_of(tensor))
            recording.values.append(tensor)
            self._makers[id(tensor)] = (recording, number)
        return Ref(number)

    def _note_uses(
        self, result: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Remember what there is now, and who uses what as far as it matters: not who asks for a shape."""
        results = tensors_in(result)
        used = tensors_in((args, kwargs))
        self._known.update((id(tensor), tensor) for tensor in (*results, *used))
        if not results and result is not None:
            return
        for tensor in used:
            self._last_use[id(tensor)] = self._clock
            maker = self._makers.get(id(tensor))
            if maker is not None and maker[0] is not self._open:
                maker[0].outputs.add(maker[1])

    def _finished(self, item: _Open) -> Recording:
        is_fit = item.is_fit and bool(item.outputs)
        try:
            for number in item.outputs:
                if kind_of(item.values[number]) != item.made[number]:
                    is_fit = False
                is_fit &= item.made[number].offset == 0
        except UnfitError:
            is_fit = False
        tape = Tape(
            steps=item.steps,
            outside=item.outside,
            made=item.made,
            outputs=sorted(item.outputs),
            sites=item.sites_after - item.sites,
        )
        return Recording(
            block=item.block,
            tape=tape if is_fit else None,
            values=item.values,
            is_last_user=[self._last_use.get(id(x), 0) <= item.end for x in item.tensors],
            is_leaf=[x.is_leaf for x in item.tensors],
        )


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of a value, also of one that a tape cannot hold."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, slice):
        return tensors_in((value.start, value.stop, value.step))
    return []


def is_ordinary() -> bool:
    """Whether operators do what they say: no autocast, no transform of functions, no inference mode."""
    return not (
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch.is_inference_mode_enabled()
        or are_functions_transformed()
    )
