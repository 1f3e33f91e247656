"""Whether a model's second forward computes what its first one does, where it changed what its code remembers.

A program is the first forward for ever. A second capture, from what the first left behind, says whether that is the
model: it is where the graphs are equal, and a tensor that is kept and never changed again may be computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import UserError
from zeroir.frontend.joint import Joint
from zeroir.frontend.python_state import PythonState, kept_tensors

_MOST_NAMES = 3


class Step(Protocol):
    """What captures: each forward begins with the ``state``."""

    state: PythonState


def note_on_state(
    joint: Joint,
    model: nn.Module,
    mode: FakeTensorMode,
    step: Step,
    modules: Sequence[str],
    capture: Callable[[], tuple[Joint, tuple[str, ...]]],
) -> str | None:
    """A sentence on what forward changes and a program does not; None where the next forward computes the same.

    ``joint`` is what ``capture`` made from the present state of ``step``, which is put back in the end.

    Raises:
        UserError: where the next forward computes something else.
    """
    first = step.state
    second = PythonState.of(model, modules)
    changed = first.changed(second)
    if not changed:
        return None
    try:
        step.state = second
        if _is_captured_alike(joint, capture):
            again = second.changed(PythonState.of(model, modules))
            return None if not again else _counts(again)
        return _kept(model, mode, step, modules, changed, capture)
    finally:
        step.state = first
        first.restore()


def _is_captured_alike(joint: Joint, capture: Callable[[], tuple[Joint, tuple[str, ...]]]) -> bool:
    try:
        return _computation(capture()[0]) == _computation(joint)
    except Exception:  # noqa: BLE001 - the tensors of another capture make torch raise whatever it likes
        return False


def _computation(joint: Joint) -> Joint:
    """A joint graph without where in the model its nodes come from."""
    nodes = tuple(replace(node, origin=None, source="") for node in joint.nodes)
    return replace(joint, nodes=nodes)


def _counts(names: Sequence[str]) -> str:
    return (
        f"The model's forward changes {_listed(names)} at every call, and the program does not: it computes what the "
        "first call does."
    )


def _kept(
    model: nn.Module,
    mode: FakeTensorMode,
    step: Step,
    modules: Sequence[str],
    changed: Sequence[str],
    capture: Callable[[], tuple[Joint, tuple[str, ...]]],
) -> str:
    """A sentence on tensors that the first forward keeps and later ones use; UserError where they do more."""
    step.state.restore()
    kept = list(kept_tensors(model, changed))
    refusal = UserError(
        f"The model's forward changes {_listed(changed)} and computes something else at its next call, while a program "
        "computes the same at every step: keep what changes in a buffer (register_buffer), or pass it with the batch."
    )
    for module, name, tensor in kept:
        delattr(module, name)
        with mode:
            module.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype), False)
    try:
        step.state = second = PythonState.of(model, modules)
        joint, _ = capture()
        is_settled = not second.changed(PythonState.of(model, modules))
    except Exception:  # noqa: BLE001 - see above
        raise refusal from None
    finally:
        for module, name, _ in kept:
            delattr(module, name)
    names = {name for name in changed if name in {each for each, _ in joint.mutations}}
    if not kept or names or not is_settled:
        raise refusal
    return (
        f"The model's forward keeps {_listed(changed)} at its first call for later ones; the program computes at every "
        "step what the first call does."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
