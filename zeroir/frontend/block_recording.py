"""Run a model once on plain fake tensors and record the torch functions that each call of a repeated block calls.

A block is a child of a list or ``Sequential`` whose class occurs there repeatedly. Calls of blocks are compared by
their call sequences, not by their code: a block that depends on its index, a cache or a counter has a sequence of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroir.frontend._torch_private import (
    Function,
    are_functions_transformed,
    autograd_functions_replaced,
)
from zeroir.frontend.block_calls import (
    CallSequence,
    TensorKind,
    TensorRef,
    TorchCall,
    UnrecordableError,
    kind_of,
    mapped,
)
from zeroir.torch_ops.neutral import NeutralOps


class BlockObserver(Protocol):
    """The object that is told when the call of a block begins and ends."""

    def enter(self, block: str) -> None:
        """A block's forward begins."""

    def leave(self, block: str) -> None:
        """A block's forward has ended, and no hook of the block has seen its result yet."""


@dataclass(slots=True)
class ObservedBlocks:
    """The blocks of one model, and their present observer."""

    names: tuple[str, ...]
    observer: BlockObserver | None = None

    def install(self, model: nn.Module) -> None:
        """Install hooks next to the forwards: all other hooks of the blocks run outside the observed calls."""
        for name in self.names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name))
            block.register_forward_hook(partial(self._leave, name), prepend=True)

    @contextmanager
    def observed_by(self, observer: BlockObserver) -> Iterator[None]:
        """Tell ``observer`` of the calls of blocks within."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    def _enter(self, name: str, _: nn.Module, __: object) -> None:
        if self.observer is not None:
            self.observer.enter(name)

    def _leave(self, name: str, _: nn.Module, __: object, ___: object) -> None:
        if self.observer is not None:
            self.observer.leave(name)


@dataclass(slots=True)
class BlockCall:
    """One recorded call of a block; without a ``sequence`` it did something that call sequences cannot hold.

    ``values`` are the tensors that it made, by number. For each tensor from outside ``is_last_user`` says whether
    nothing uses it after the call, and ``is_leaf`` whether it is a parameter itself or has no gradient.
    """

    block: str
    sequence: CallSequence | None
    values: list[Tensor]
    is_last_user: list[bool]
    is_leaf: list[bool]


@dataclass(slots=True)
class _UnfinishedCall:
    """A call of a block that is being recorded. ``versions`` are those of ``tensors`` when each was first used."""

    block: str
    sites_before: int
    calls: list[TorchCall] = field(default_factory=list)
    inputs: list[TensorKind] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    results: list[TensorKind] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    sites_after: int = 0
    end: int = 0
    is_recordable: bool = True


class BlockRecorder(TorchFunctionMode):
    """A mode that records the calls of blocks; ``existing`` are the tensors that exist when the forward begins."""

    def __init__(self, neutral: NeutralOps, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self._neutral = neutral
        # Alive for as long as the recorder, so that no two of them share an id.
        self._existing = {id(tensor): tensor for tensor in existing}
        self._makers: dict[int, tuple[_UnfinishedCall, int]] = {}
        self._last_use: dict[int, int] = {}
        self._call_count = 0
        self._depth = 0
        self._recorded: list[_UnfinishedCall] = []
        self._current: _UnfinishedCall | None = None

    def block_calls(self) -> list[BlockCall]:
        """The calls of blocks in order, once the forward has ended."""
        return [self._finished(call) for call in self._recorded]

    def enter(self, block: str) -> None:
        """A block's forward begins."""
        if self._current is not None:
            self._current.is_recordable = False
            return
        self._current = _UnfinishedCall(block, self._neutral.sites)
        self._current.is_recordable = _is_ordinary()
        self._recorded.append(self._current)

    def leave(self, block: str) -> None:
        """A block's forward has ended."""
        current = self._current
        if current is None or current.block != block:
            return
        self._current = None
        current.sites_after = self._neutral.sites
        current.end = self._call_count
        with torch._C.DisableTorchFunction():
            versions = [tensor._version for tensor in current.tensors]
        # A block that changes a tensor from outside in place is not a function of that tensor.
        current.is_recordable &= versions == current.versions

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` and record the call."""
        named_args = dict(kwargs or {})
        self._call_count += 1
        current = self._current
        call = None if current is None else self._call_of(current, func, args, named_args)
        self._depth += 1
        try:
            result = func(*args, **named_args)
        finally:
            self._depth -= 1
        if current is not None and call is not None:
            self._record(current, call, result)
        self._note_uses(result, args, named_args)
        return result

    def autograd_functions(self) -> AbstractContextManager[None]:
        """Stop recording where the model calls an autograd function of its own, which is not a torch function."""

        def apply(original: Function, cls: type, /, *args: object, **kwargs: object) -> object:
            if self._depth == 0 and self._current is not None:
                self._current.is_recordable = False
            return original(cls, *args, **kwargs)

        return autograd_functions_replaced(apply)

    def _call_of(
        self,
        current: _UnfinishedCall,
        func: Function,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> TorchCall | None:
        """A call without its result; None, and the recording ends, where a sequence cannot hold the call."""

        def numbered(value: object) -> object:
            return mapped(value, lambda tensor: self._used(current, tensor))

        if not current.is_recordable:
            return None
        try:
            numbered_args = tuple(numbered(arg) for arg in args)
            numbered_kwargs = {key: numbered(arg) for key, arg in kwargs.items()}
        except UnrecordableError:
            current.is_recordable = False
            return None
        if not _is_ordinary() or getattr(func, "__name__", "") == "__set__":
            current.is_recordable = False
            return None
        return TorchCall(func, numbered_args, numbered_kwargs, None, torch.is_grad_enabled())

    def _record(self, current: _UnfinishedCall, call: TorchCall, result: object) -> None:
        try:
            numbered = mapped(result, lambda tensor: self._made(current, tensor))
        except UnrecordableError:
            current.is_recordable = False
        else:
            current.calls.append(replace(call, result=numbered))

    def _used(self, current: _UnfinishedCall, tensor: Tensor) -> TensorRef:
        number = current.numbers.get(id(tensor))
        if number is not None:
            return TensorRef(number)
        if id(tensor) not in self._existing:
            raise UnrecordableError("a tensor that no torch function made")
        kind = kind_of(tensor)
        if kind.offset != 0:
            raise UnrecordableError("a part of a tensor from outside")
        number = current.numbers[id(tensor)] = -1 - len(current.inputs)
        current.inputs.append(kind)
        current.tensors.append(tensor)
        with torch._C.DisableTorchFunction():
            current.versions.append(tensor._version)
        return TensorRef(number)

    def _made(self, current: _UnfinishedCall, tensor: Tensor) -> TensorRef:
        number = current.numbers.get(id(tensor))
        if number is None:
            if id(tensor) in self._existing:
                raise UnrecordableError("a tensor from outside that is not an argument")
            number = current.numbers[id(tensor)] = len(current.values)
            current.results.append(kind_of(tensor))
            current.values.append(tensor)
            self._makers[id(tensor)] = (current, number)
        return TensorRef(number)

    def _note_uses(
        self, result: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Note the tensors that exist now and the last use of each; a question for a shape is not a use."""
        results = tensors_in(result)
        used = tensors_in((args, kwargs))
        self._existing.update((id(tensor), tensor) for tensor in (*results, *used))
        if not results and result is not None:
            return
        for tensor in used:
            self._last_use[id(tensor)] = self._call_count
            maker = self._makers.get(id(tensor))
            if maker is not None and maker[0] is not self._current:
                maker[0].outputs.add(maker[1])

    def _finished(self, call: _UnfinishedCall) -> BlockCall:
        is_recordable = call.is_recordable and bool(call.outputs)
        try:
            for number in call.outputs:
                if kind_of(call.values[number]) != call.results[number]:
                    is_recordable = False
                is_recordable &= call.results[number].offset == 0
        except UnrecordableError:
            is_recordable = False
        sequence = CallSequence(
            calls=call.calls,
            inputs=call.inputs,
            results=call.results,
            outputs=sorted(call.outputs),
            sites=call.sites_after - call.sites_before,
        )
        return BlockCall(
            block=call.block,
            sequence=sequence if is_recordable else None,
            values=call.values,
            is_last_user=[self._last_use.get(id(x), 0) <= call.end for x in call.tensors],
            is_leaf=[x.is_leaf for x in call.tensors],
        )


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in a value, also in one that a call sequence cannot hold."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, slice):
        return tensors_in((value.start, value.stop, value.step))
    return []


def _is_ordinary() -> bool:
    """Whether operators run unmodified: without autocast, function transforms and inference mode."""
    return not (
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch.is_inference_mode_enabled()
        or are_functions_transformed()
    )
