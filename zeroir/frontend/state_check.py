"""Check that a model's second forward computes the same as its first, where the first changed the Python state.

A program repeats the first forward at every step. So the model is captured again with the state that the first forward
left behind. The program computes what the model computes if the two graphs are equal, or if the first forward only kept
tensors that never change again: the program computes those anew at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import UserError
from zeroir.frontend.joint_graph import JointGraph
from zeroir.frontend.loss_step import LossStep
from zeroir.frontend.python_state import PythonState, tensor_attributes

_MOST_NAMES = 3


def note_on_state(
    joint: JointGraph,
    model: nn.Module,
    mode: FakeTensorMode,
    step: LossStep,
    modules: Sequence[str],
    capture: Callable[[], JointGraph],
) -> str | None:
    """A sentence on the state that forward changes and a program does not; None where the next forward is the same.

    ``joint`` is the graph that ``capture`` made from the present state of ``step``, which is restored at the end.
    ``modules`` names the user's Python modules.

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
            changed_again = second.changed(PythonState.of(model, modules))
            return None if not changed_again else _counter_note(changed_again)
        return _kept_tensor_note(model, mode, step, modules, changed, capture)
    finally:
        step.state = first
        first.restore()


def _is_captured_alike(joint: JointGraph, capture: Callable[[], JointGraph]) -> bool:
    try:
        return _computation(capture()) == _computation(joint)
    except Exception:  # noqa: BLE001 - torch raises various errors at the tensors of an earlier capture
        return False


def _computation(joint: JointGraph) -> JointGraph:
    """A joint graph whose nodes do not say where in the model they come from."""
    nodes = tuple(replace(node, origin=None, source="") for node in joint.nodes)
    return replace(joint, nodes=nodes)


def _counter_note(names: Sequence[str]) -> str:
    return (
        f"The model's forward changes {_listed(names)} at every call, and the program does not: it computes what the "
        "first call does."
    )


def _kept_tensor_note(
    model: nn.Module,
    mode: FakeTensorMode,
    step: LossStep,
    modules: Sequence[str],
    changed: Sequence[str],
    capture: Callable[[], JointGraph],
) -> str:
    """A sentence on tensors that the first forward keeps and later ones use; UserError where later ones change them."""
    step.state.restore()
    attributes = list(tensor_attributes(model, changed))
    refusal = UserError(
        f"The model's forward changes {_listed(changed)} and computes something else at its next call, while a program "
        "computes the same at every step: keep changing state in a buffer (register_buffer), or pass it with the batch."
    )
    for module, name, tensor in attributes:
        delattr(module, name)
        with mode:
            module.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype), False)
    try:
        step.state = second = PythonState.of(model, modules)
        joint = capture()
        is_settled = not second.changed(PythonState.of(model, modules))
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
