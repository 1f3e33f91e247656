"""Trace a model with one node in the place of each call of an equal block.

The model's own Python runs as ever. Inside a block that a template stands for, its calls of torch functions are
compared with the tape one by one and answered with the tape's tensors; when the block's forward ends, one operator
yields what it is for the rest of the model. Where a call differs, the capture begins again without templates.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from zeroir.frontend.block_calls import (
    Kind,
    Ref,
    Tape,
    UnfitError,
    are_same,
    are_same_calls,
    filled,
    kind_of,
    mapped,
    refs_in,
)
from zeroir.frontend.block_recording import Function, Recording, tensors_in
from zeroir.frontend.template import Template, make_template
from zeroir.frontend.tracking import Note, Tracker
from zeroir.torch_ops.neutral import NeutralOps


class DivergedError(Exception):
    """A model does something else than when it was rehearsed."""


@dataclass(slots=True)
class Instance:
    """One call of a block, and the notes of its steps where a template stands for it."""

    recording: Recording
    template: Template | None
    notes: list[Note] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """The calls of blocks in order; a node of the joint graph names them by their place here."""

    instances: list[Instance]
    has_diverged: bool = False
    misfits: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether no template stands for anything."""
        return all(instance.template is None for instance in self.instances)

    def drop_misfits(self) -> None:
        """Trace one by one the calls whose outputs got gradients of other kinds than their template's."""
        for at in self.misfits:
            self.instances[at].template = None
        self.misfits.clear()

    def diverged(self, why: str) -> DivergedError:
        """The error to raise; it is remembered, should the model catch it."""
        self.has_diverged = True
        return DivergedError(why)


def make_plan(recordings: Sequence[Recording], mode: FakeTensorMode, minimum: int) -> Plan:
    """Templates for calls that are equal, where there are at least ``minimum`` of them."""
    groups: list[tuple[Tape, list[Instance]]] = []
    instances = [Instance(recording, None) for recording in recordings]
    for instance in instances:
        tape = instance.recording.tape
        if tape is None:
            continue
        group = next((members for other, members in groups if other.equals(tape)), None)
        if group is None:
            groups.append((tape, [instance]))
        else:
            group.append(instance)
    for tape, members in groups:
        if len(members) < minimum:
            continue
        try:
            template = make_template(tape, mode)
        except Exception:  # noqa: BLE001 - whatever it is, the model itself will tell it better
            continue
        for member in members:
            if template.fits(member.recording):
                member.template = template
    return Plan(instances)


@torch.library.custom_op("zeroir::block", mutates_args=())
def block(inputs: Sequence[Tensor], instance: int, results: str) -> list[Tensor]:
    """The outputs of a block's forward; it stands in joint graphs alone, and only until they are read."""
    raise NotImplementedError


@torch.library.custom_op("zeroir::block_backward", mutates_args=())
def block_backward(tangents: Sequence[Tensor], instance: int, results: str) -> list[Tensor]:
    """The gradients of what a block took from outside, where there are any."""
    raise NotImplementedError


@block.register_fake
@block_backward.register_fake
def _(tensors: Sequence[Tensor], _: int, results: str) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=tensors[0].device)
        for dtype, shape, stride in json.loads(results)
    ]


def _described(kinds: Sequence[Kind]) -> str:
    return json.dumps(
        [(str(k.dtype).removeprefix("torch."), list(k.shape), list(k.stride)) for k in kinds]
    )


class _BlockFunction(torch.autograd.Function):
    """One node of autograd for a whole block."""

    @staticmethod
    def forward(
        ctx: _Context, plan: Plan, at: int, template: Template, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        tape = template.tape
        kinds = [tape.made[index] for index in tape.outputs]
        found = block(inputs, at, _described(kinds))
        ctx.plan, ctx.at, ctx.template = plan, at, template
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for x, kind in zip(found, kinds, strict=True) if not kind.requires_grad)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: _Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        template = ctx.template
        wanted = list(template.tangents)
        if [None if x is None else kind_of(x) for x in tangents] != [
            None if kind is None else _without_grad(kind) for kind in wanted
        ]:
            ctx.plan.misfits.add(ctx.at)
        kinds = [kind for kind in template.gradients if kind is not None]
        given = [x for x in tangents if x is not None]
        found = iter(block_backward(given, ctx.at, _described(kinds)))
        by_input = [None if kind is None else next(found) for kind in template.gradients]
        seeds = [None] * template.tape.sites
        return (None, None, None, *by_input, *seeds)


class _Context(torch.autograd.function.FunctionCtx):
    plan: Plan
    at: int
    template: Template


def _without_grad(kind: Kind) -> Kind:
    return Kind(kind.dtype, kind.shape, kind.stride, kind.offset, False)


class Replayer(TorchFunctionMode):
    """A mode for one forward of a model whose blocks have been rehearsed."""

    def __init__(self, plan: Plan, neutral: NeutralOps, tracker: Tracker) -> None:
        super().__init__()
        self._plan = plan
        self._neutral = neutral
        self._tracker = tracker
        self._next = 0
        # The block under way.
        self._instance: Instance | None = None
        self._numbers: dict[int, int] = {}
        self._outside: list[Tensor] = []
        # For the tensors of tapes, which have been handed to the model, those of the joint graph.
        self._real: dict[int, Tensor] = {}
        self._stand_ins = {id(x) for item in plan.instances for x in item.recording.values}

    def enter(self, block: str) -> None:
        """A block's forward begins."""
        if self._instance is not None:
            raise self._plan.diverged("a block calls a block")
        if self._next >= len(self._plan.instances):
            raise self._plan.diverged("there are more calls of blocks")
        instance = self._plan.instances[self._next]
        self._next += 1
        if instance.recording.block != block:
            raise self._plan.diverged("blocks are called in another order")
        if instance.template is None:
            return
        self._instance = instance
        instance.notes = []
        self._numbers = {id(x): number for number, x in enumerate(instance.recording.values)}
        self._outside = []

    def leave(self, block: str) -> None:
        """A block's forward has ended: what the model goes on with comes out of one node."""
        instance = self._instance
        if instance is None:
            return
        self._instance = None
        template = instance.template
        assert template is not None
        tape = template.tape
        if instance.recording.block != block or len(instance.notes) != len(tape.steps):
            raise self._plan.diverged("a block does less")
        seeds = [self._neutral.seed() for _ in range(tape.sites)]
        with torch._C.DisableTorchFunction():
            found = _BlockFunction.apply(  # type: ignore[no-untyped-call]
                self._plan, self._next - 1, template, *self._outside, *seeds
            )
        for index, tensor in zip(tape.outputs, found, strict=True):
            if kind_of(tensor) != tape.made[index]:
                raise self._plan.diverged("a block's output is of another kind")
            self._real[id(instance.recording.values[index])] = tensor

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer a call inside a block from its tape; make any other on real tensors."""
        given = dict(kwargs or {})
        if self._plan.has_diverged:
            # The model unwinds, and what its context managers set back is set back.
            return func(*args, **given)
        if self._instance is not None:
            return self._answer(self._instance, func, args, given)
        args, given = self._with_real(args), self._with_real(given)  # type: ignore[assignment]
        result = func(*args, **given)
        if result is None or tensors_in(result):
            self._require_real((args, given))
        return result

    @contextmanager
    def own_functions(self) -> Iterator[None]:
        """Give a user's own autograd functions, which are no torch functions, the real tensors, too."""
        original = inspect.getattr_static(torch.autograd.Function, "apply").__func__

        def apply(cls: type, /, *args: object, **kwargs: object) -> object:
            if cls is _BlockFunction or self._plan.has_diverged:
                return original(cls, *args, **kwargs)
            if self._instance is not None:
                raise self._plan.diverged("a block calls a function of its own")
            args, kwargs = self._with_real(args), self._with_real(kwargs)  # type: ignore[assignment]
            self._require_real((args, kwargs))
            return original(cls, *args, **kwargs)

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def _require_real(self, value: object) -> None:
        if any(id(x) in self._stand_ins for x in tensors_in(value)):
            raise self._plan.diverged("another tensor of a block is used after it")

    def _with_real(self, value: object) -> object:
        if not any(id(x) in self._real for x in tensors_in(value)):
            return value
        try:
            return mapped(value, lambda x: self._real.get(id(x), x))
        except UnfitError as error:
            raise self._plan.diverged(str(error)) from None

    def _answer(
        self,
        instance: Instance,
        func: Function,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        assert instance.template is not None
        tape = instance.template.tape
        if len(instance.notes) == len(tape.steps):
            raise self._plan.diverged("a block does more")
        step = tape.steps[len(instance.notes)]
        try:
            taken, named = self._numbered(instance, args), self._numbered(instance, kwargs)
        except UnfitError as error:
            raise self._plan.diverged(str(error)) from None
        if not are_same_calls(step, func, taken, named) or torch.is_grad_enabled() != step.has_grad:
            raise self._plan.diverged("a block does something else")
        instance.notes.append(self._tracker.note())
        if refs_in((step.args, step.kwargs, step.result)):
            values = instance.recording.values
            return filled(step.result, lambda i: values[i] if i >= 0 else self._outside[-1 - i])
        # It may set something, such as whether gradients are wanted.
        result = func(*args, **kwargs)
        if not are_same(result, step.result):
            raise self._plan.diverged("a block is told something else")
        return result

    def _numbered(self, instance: Instance, value: object) -> object:
        return mapped(value, lambda x: self._number(instance, x))

    def _number(self, instance: Instance, tensor: Tensor) -> Ref:
        real = self._real.get(id(tensor), tensor)
        number = self._numbers.get(id(real))
        if number is None:
            assert instance.template is not None
            outside = instance.template.tape.outside
            count = len(self._outside)
            if count == len(outside) or kind_of(real) != outside[count]:
                raise UnfitError("another tensor from outside")
            number = self._numbers[id(real)] = -1 - count
            self._outside.append(real)
        return Ref(number)
