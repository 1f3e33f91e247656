"""Checks that a model's second forward computes the same as its first, where the first changed the Python state.

A program repeats the first forward at every step. So the model is captured again with the state that the first forward
left. The program is correct if the two graphs are equal and the state no longer changes, or if the first forward only
stored tensors that never change again: the program computes those at every step.

State that changes at every call is rejected, because a later forward or the user's own code may read it. There are two
exceptions. Numbers that provably affect only their own next values, as in ``self.calls += 1``, cause a warning: the
model is captured once more with objects instead of them that can be added and multiplied, but not read. Tensors that
every forward stores or appends to a list are outputs of the program (``stored_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import UserError
from zeroir.frontend.capture.captured_graph import CapturedGraph
from zeroir.frontend.capture.loss_step import LossStep
from zeroir.frontend.capture.python_state import (
    PythonState,
    number_attributes,
    tensor_attributes,
)
from zeroir.frontend.source.generators import later_clocks
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.stored_tensors import Container, StorePlace

_MOST_NAMES = 3
_OPAQUE = "--opaque PATTERN with its name, or --opaque root"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedState:
    """What a forward does to the state: where it stores tensors, and a sentence on what a program does not do."""

    stores: tuple[StorePlace, ...] = ()
    note: str | None = None


def checked_state(
    joint: CapturedGraph,
    model: nn.Module,
    mode: FakeTensorMode,
    step: LossStep,
    capture: Callable[[], CapturedGraph],
) -> ChangedState:
    """Return what forward does to the state, if the next forward computes the same.

    ``joint`` is the graph that ``capture`` created from the present state of ``step``, which is restored at the end.

    Raises:
        UserError: if the next forward computes something else, or every forward leaves another state.
    """
    first, of_forward = step.state, step.places
    second = PythonState.of(model, step.state.code)
    changed, stores = first.changed(second), first.stores()
    if not changed and not stores:
        return ChangedState()
    try:
        step.state = second
        if not _is_captured_alike(joint, capture):
            names = changed or [store.name for store in stores]
            return ChangedState(note=_kept_tensor_note(model, mode, step, names, capture))
        third = PythonState.of(model, step.state.code)
        every_time = tuple(s for s in _stored_again(stores, first, second) if s.is_made)
        # What the backward appends to is no value of the forward, and the script would find nothing there.
        growing = {store.name for store in every_time if store.is_appended and store in of_forward}
        changed_again = [name for name in second.changed(third) if name not in growing]
        note = None
        if changed_again:
            note = _counter_note(joint, model, step, changed_again, capture)
        present = {id(container.values) for container in second.containers}
        once = [
            store
            for store in stores
            if store not in every_time
            and not store.is_appended
            and id(first.containers[store.container].values) in present
        ]
        step.state = second
        second.restore()
        unread = _unread(joint, model, step, once, first.containers, capture)
        if unread and note is None:
            note = note_on_stores([store.name for store in unread])
        return ChangedState(stores=every_time, note=note)
    finally:
        step.state = first
        first.restore()


def require_no_clock(
    joint: CapturedGraph,
    model: nn.Module,
    step: LossStep,
    reached: ReachedCode,
    capture: Callable[[], CapturedGraph],
) -> None:
    """Raise a UserError if a later capture of code that reads a clock is not ``joint``, or it draws random bits."""
    line, first = reached.clock_line, step.state
    with later_clocks(reached.functions) as has_drawn:
        # The earlier state would restore the globals that are clocks.
        step.state = PythonState.of(model, first.code)
        try:
            is_alike = _is_captured_alike(joint, capture)
        finally:
            step.state.restore()
            step.state = first
    if not is_alike or has_drawn():
        raise UserError(
            f"The model computes with a clock or with random bits of the system, which {line} reads, while a program "
            "computes the same at every step: pass the value with the batch, or draw from torch's generators."
        )


def stores_of_evaluation(
    joint: CapturedGraph, model: nn.Module, step: LossStep, capture: Callable[[], CapturedGraph]
) -> tuple[StorePlace, ...]:
    """Return where each evaluation stores tensors; ``joint`` is its graph, from the present state of ``step``."""
    first = step.state
    stores = first.stores()
    if not stores:
        return ()
    try:
        step.state = second = PythonState.of(model, first.code)
        if not _is_captured_alike(joint, capture):
            return ()
        return tuple(s for s in _stored_again(stores, first, second) if s.is_made)
    finally:
        step.state = first
        first.restore()


def _stored_again(
    stores: Sequence[StorePlace], first: PythonState, second: PythonState
) -> tuple[StorePlace, ...]:
    """Return those of the places at which a second forward, too, has just stored something."""
    again = {second.place_of(store) for store in second.stores()}
    return tuple(store for store in stores if first.place_of(store) in again)


def note_on_stores(names: Sequence[str]) -> str:
    """Return a sentence on tensors that forward stores and a program does not."""
    return (
        f"The model's forward stores {_listed(names)}, and the program, which runs none of its Python code, does not: "
        "return what you want to see beside the loss, as an output of evaluations, or compute it within `with "
        "engine.gathered() as module`."
    )


def _is_captured_alike(joint: CapturedGraph, capture: Callable[[], CapturedGraph]) -> bool:
    try:
        return _computation(capture()) == _computation(joint)
    except Exception:  # noqa: BLE001 - torch raises various errors at the tensors of an earlier capture
        return False


def _computation(joint: CapturedGraph) -> CapturedGraph:
    """Return a joint graph without the origins of its nodes."""
    nodes = tuple(replace(node, origin=None, source="") for node in joint.nodes)
    return replace(joint, nodes=nodes)


def _counter_note(
    joint: CapturedGraph,
    model: nn.Module,
    step: LossStep,
    names: Sequence[str],
    capture: Callable[[], CapturedGraph],
) -> str:
    """Return a sentence on numbers that change at every call without effect; UserError for other state."""
    counters = list(number_attributes(step.state.modules, names))
    if len(counters) == len(names) and _enter_nothing(joint, model, step, counters, capture):
        return (
            f"The model's forward changes {_listed(names)} at every call, and the program does not; no computation "
            "depends on it."
        )
    raise UserError(
        f"The model's forward changes {_listed(names)} at every call, and the program, which runs none of its Python "
        "code, does not: keep a count in a buffer (register_buffer), return other values as outputs, remove the code "
        f"that changes it, or let the module's code run as it is: {_OPAQUE}."
    )


def _unread(
    joint: CapturedGraph,
    model: nn.Module,
    step: LossStep,
    stores: Sequence[StorePlace],
    containers: Sequence[Container],
    capture: Callable[[], CapturedGraph],
) -> tuple[StorePlace, ...]:
    """Return those of the places that the next forward does not read.

    The others are caches, which a program needs no more. ``step`` has the state that a forward left in ``containers``.
    """
    if not stores:
        return ()
    state = step.state
    reads: list[str] = []
    for store in stores:
        containers[store.container].put(store, UnreadableNumber(reads))
    step.state = PythonState.of(model, state.code)
    is_alike = _is_captured_alike(joint, capture)
    step.state = state
    state.restore_exactly()
    if is_alike and not reads:
        return tuple(stores)
    if len(stores) == 1:
        return ()
    half = len(stores) // 2
    return (
        *_unread(joint, model, step, stores[:half], containers, capture),
        *_unread(joint, model, step, stores[half:], containers, capture),
    )


def _enter_nothing(
    joint: CapturedGraph,
    model: nn.Module,
    step: LossStep,
    counters: Sequence[tuple[nn.Module, str, float]],
    capture: Callable[[], CapturedGraph],
) -> bool:
    """Return whether capture gives the same graph with unreadable numbers instead of ``counters``."""
    reads: list[str] = []
    try:
        for module, name, _ in counters:
            setattr(module, name, UnreadableNumber(reads))
        step.state = PythonState.of(model, step.state.code)
        is_alike = _is_captured_alike(joint, capture)
        are_left = all(isinstance(vars(m)[name], UnreadableNumber) for m, name, _ in counters)
    finally:
        for module, name, value in counters:
            setattr(module, name, value)
    return is_alike and are_left and not reads


class UnreadableNumber:
    """Represents any number.

    Arithmetic with plain numbers returns another one; every other use is noted in ``reads``.
    """

    __slots__ = ("reads",)

    def __init__(self, reads: list[str]) -> None:
        self.reads = reads

    def _combined(self, other: object = 0, *_: object) -> UnreadableNumber:
        if not isinstance(other, int | float | UnreadableNumber):
            _refuse(self)
        return UnreadableNumber(self.reads)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _combined
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _combined
    __neg__ = __pos__ = _combined


def _refuse(number: UnreadableNumber, *_: object) -> NoReturn:
    number.reads.append("read")
    raise TypeError("The value of this number must not be read.")


for _operators in (
    ("bool", "int", "float", "index", "hash", "str", "repr", "format", "round", "iter", "abs"),
    ("eq", "ne", "lt", "le", "gt", "ge", "pow", "rpow", "getattr", "reduce_ex"),
):
    for _operator in _operators:
        setattr(UnreadableNumber, f"__{_operator}__", _refuse)


def _kept_tensor_note(
    model: nn.Module,
    mode: FakeTensorMode,
    step: LossStep,
    changed: Sequence[str],
    capture: Callable[[], CapturedGraph],
) -> str:
    """Return a sentence on tensors that the first forward stores and later ones use; UserError if they change."""
    step.state.restore()
    attributes = list(tensor_attributes(step.state.modules, changed))
    refusal = UserError(
        f"The model's forward changes {_listed(changed)} and computes something else at its next call, while a program "
        "computes the same at every step: keep changing state in a buffer (register_buffer), pass it with the batch, "
        f"or let the module's code run as it is: {_OPAQUE}."
    )
    for module, name, tensor in attributes:
        delattr(module, name)
        with mode:
            module.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype), False)
    try:
        step.state = second = PythonState.of(model, step.state.code)
        joint = capture()
        is_settled = not second.changed(PythonState.of(model, step.state.code))
    except Exception:  # noqa: BLE001 - as in _is_captured_alike
        raise refusal from None
    finally:
        for module, name, _ in attributes:
            delattr(module, name)
    mutated = {name for name, _ in joint.mutations}
    if not attributes or not mutated.isdisjoint(changed) or not is_settled:
        raise refusal
    return (
        f"The model's forward keeps {_listed(changed)} at its first call for later ones; the program computes at every "
        "step what the first call does."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
