"""Runs a model once on plain fake tensors and records the torch functions that it calls.

A block is a child of a list or ``Sequential`` whose class occurs there repeatedly. Calls of blocks are compared by
their call sequences, not by their code: a block that depends on its index, a cache or a counter has its own sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from zeroir.frontend._torch_private import (
    Function,
    autograd_functions_replaced,
    operator_context,
)
from zeroir.frontend.capture.blocks.calls import (
    CallSequence,
    TensorKind,
    TensorRef,
    TorchCall,
    UnrecordableError,
    filled,
    kind_of,
    mapped,
    refs_in,
)
from zeroir.frontend.capture.node_origins import OriginTracker
from zeroir.torch_ops.neutral import NeutralOps


@dataclass(slots=True)
class BlockCall:
    """One call of a block in a recorded forward: the calls of torch functions from ``start`` to ``stop``.

    ``inputs`` are the numbers of the external tensors, in the order of first use, and ``outputs`` those of the results
    that are used after the block. For each input ``is_last_user`` says whether nothing uses it after the call, and
    ``is_leaf`` whether it is a parameter itself or has no gradient. ``sequence`` is None if the block did something
    that call sequences cannot represent.
    """

    block: str
    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_last_user: tuple[bool, ...]
    is_leaf: tuple[bool, ...]
    sequence: CallSequence | None


@dataclass(slots=True, kw_only=True)
class ForwardRecording:
    """The calls of torch functions in one forward.

    External tensors count down from -1: the inputs of the forward and the model's tensors, then ``constants``, which
    are other real tensors of the model. ``kinds`` describe the results of calls, and ``results`` are the numbers of
    those that the forward returns.
    """

    calls: list[TorchCall]
    kinds: list[TensorKind]
    constants: list[Tensor]
    block_calls: list[BlockCall]
    results: tuple[int, ...]


@dataclass(slots=True)
class _UnfinishedCall:
    """A call of a block that is being recorded, with the kind and version of each input at its first use."""

    block: str
    start: int
    first_result: int
    sites_before: int
    inputs: dict[int, tuple[TensorKind, int]] = field(default_factory=dict)
    stop: int = 0
    last_result: int = 0
    sites: int = 0
    is_recordable: bool = True


class ForwardRecorder(TorchFunctionMode):
    """A mode that records a forward; ``outside`` are its inputs and the model's tensors."""

    def __init__(
        self, neutral: NeutralOps, tracker: OriginTracker, outside: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._neutral = neutral
        self._tracker = tracker
        # They are kept alive with the recorder, so that no two of them share an id.
        self._tensors = {-1 - at: tensor for at, tensor in enumerate(outside)}
        self._numbers = {id(tensor): number for number, tensor in self._tensors.items()}
        self._calls: list[TorchCall] = []
        self._kinds: list[TensorKind] = []
        self._constants: list[Tensor] = []
        self._blocks: list[_UnfinishedCall] = []
        self._current: _UnfinishedCall | None = None
        self._context = operator_context()
        self._is_inside = False
        self._is_repeatable = True

    def recording(self, results: Sequence[Tensor]) -> ForwardRecording:
        """Return the recorded forward, which returned ``results``.

        Raises:
            UnrecordableError: if the calls cannot be repeated.
        """
        has_backward = any(x.grad is not None for number, x in self._tensors.items() if number < 0)
        if not self._is_repeatable or has_backward:
            raise UnrecordableError("a call that cannot be made again")
        last_use = {
            number: at
            for at, call in enumerate(self._calls)
            for number in refs_in((call.args, call.kwargs))
        }
        returned = tuple(self._numbers[id(tensor)] for tensor in results)
        last_use.update(dict.fromkeys(returned, len(self._calls)))
        return ForwardRecording(
            calls=self._calls,
            kinds=self._kinds,
            constants=self._constants,
            block_calls=[self._finished(call, last_use) for call in self._blocks],
            results=returned,
        )

    def enter(self, block: str) -> None:
        """Note that a block's forward starts."""
        if self._current is not None:
            self._current.is_recordable = False
            return
        self._current = _UnfinishedCall(
            block, len(self._calls), len(self._kinds), self._neutral.sites
        )
        self._blocks.append(self._current)

    def leave(self, block: str) -> None:
        """Note that a block's forward has ended; no hook of the block has seen its result yet."""
        current = self._current
        if current is None or current.block != block:
            return
        self._current = None
        current.stop, current.last_result = len(self._calls), len(self._kinds)
        current.sites = self._neutral.sites - current.sites_before
        # A block that changes an external tensor in place is not a function of that tensor.
        with torch._C.DisableTorchFunction():
            current.is_recordable &= all(
                self._tensors[number]._version == version
                for number, (_, version) in current.inputs.items()
            )

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` and record the call."""
        if getattr(func, "__name__", "") == "__set__":
            self._leave_unrecorded()
        return self._recorded(func, args, dict(kwargs or {}))

    def autograd_functions(self) -> AbstractContextManager[None]:
        """Record calls of the model's own autograd functions, which are not torch functions, outside blocks."""

        def apply(original: Function, cls: type, /, *args: object, **kwargs: object) -> object:
            if not self._is_inside:
                self._leave_unrecorded()
            return self._recorded(partial(original, cls), args, kwargs)

        return autograd_functions_replaced(apply)

    def _leave_unrecorded(self) -> None:
        """Mark the current block as having no call sequence."""
        if self._current is not None:
            self._current.is_recordable = False

    def _recorded(
        self, func: Function, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._is_inside:
            return func(*args, **kwargs)
        # Before the call, which may change its arguments.
        numbered_args, numbered_kwargs = mapped(args, self._used), mapped(kwargs, self._used)
        has_grad = torch.is_grad_enabled()
        self._is_inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_inside = False
        numbered = mapped(result, self._made)
        # A query, such as that for a shape, is not repeated.
        if refs_in(numbered) or (result is None and refs_in((numbered_args, numbered_kwargs))):
            self._is_repeatable &= operator_context() == self._context
            origin = self._tracker.origin()
            self._calls.append(
                TorchCall(func, numbered_args, numbered_kwargs, numbered, has_grad, origin)
            )
        return result

    def _used(self, value: object) -> object:
        """Return the number of an argument."""
        if not isinstance(value, Tensor):
            self._leave_unrecorded()
            return value
        number = self._numbers.get(id(value))
        if number is None:
            # Repeated calls would not get a tensor that no torch function created, unless it has data.
            self._is_repeatable &= not isinstance(value, FakeTensor)
            number = min(self._tensors, default=0) - 1
            self._constants.append(value)
            self._add(value, number)
        current = self._current
        if current is not None and number < current.first_result and number not in current.inputs:
            kind = kind_of(value)
            with torch._C.DisableTorchFunction():
                current.inputs[number] = (kind, value._version)
            # Part of an external tensor has an offset.
            current.is_recordable &= kind.offset == 0
        return TensorRef(number)

    def _made(self, value: object) -> object:
        """Return the number of a result."""
        if not isinstance(value, Tensor):
            # The model may change the backward through it, for example through an autograd node or a hook handle.
            self._is_repeatable = False
            return value
        current = self._current
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self._kinds)
            self._kinds.append(kind_of(value))
            self._add(value, number)
        elif current and number < current.first_result and number not in current.inputs:
            # an external tensor that is not an argument
            current.is_recordable = False
        return TensorRef(number)

    def _add(self, tensor: Tensor, number: int) -> None:
        self._tensors[number] = tensor
        self._numbers[id(tensor)] = number

    def _finished(self, call: _UnfinishedCall, last_use: Mapping[int, int]) -> BlockCall:
        results = range(call.first_result, call.last_result)
        outputs = [number for number in results if last_use.get(number, -1) >= call.stop]
        is_recordable = call.is_recordable and bool(outputs)
        for number in outputs:
            kind = self._kinds[number]
            is_recordable &= kind.offset == 0 and kind == kind_of(self._tensors[number])
        tensors = [self._tensors[number] for number in call.inputs]
        return BlockCall(
            block=call.block,
            start=call.start,
            stop=call.stop,
            inputs=tuple(call.inputs),
            outputs=tuple(outputs),
            is_last_user=tuple(last_use.get(number, -1) < call.stop for number in call.inputs),
            is_leaf=tuple(tensor.is_leaf for tensor in tensors),
            sequence=self._sequence(call, outputs) if is_recordable else None,
        )

    def _sequence(self, call: _UnfinishedCall, outputs: Sequence[int]) -> CallSequence:
        numbers = {number: -1 - at for at, number in enumerate(call.inputs)}

        def local(value: object) -> object:
            return filled(value, lambda n: TensorRef(numbers.get(n, n - call.first_result)))

        return CallSequence(
            calls=[
                replace(
                    made,
                    args=local(made.args),
                    kwargs=local(made.kwargs),
                    result=local(made.result),
                )
                for made in self._calls[call.start : call.stop]
            ],
            inputs=[kind for kind, _ in call.inputs.values()],
            results=self._kinds[call.first_result : call.last_result],
            outputs=[number - call.first_result for number in outputs],
            sites=call.sites,
        )
