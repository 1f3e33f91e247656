"""The parts of torch's internals that the frontend uses: these tests name the part that a new torch changes."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroir.frontend import _torch_hooks
from zeroir.frontend import _torch_private as private

T = TypeVar("T")


class Toy(nn.Module):
    """Two layers with tied weights and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        note: Callable[..., object] = private.annotated(self.one, lambda: "first")
        y = note(x)
        assert isinstance(y, Tensor)
        z: Tensor = self.two(y + x)
        return z.sum()


def attempt(step: Callable[[], T]) -> T:
    """Run a step of the private interface; a failure names the torch that changed it."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - any error of a new torch
        pytest.fail(f"torch {torch.__version__} changed what zeroir.frontend relies on: {error!r}")


def graph() -> private.TracedGraph:
    mode = private.fake_mode()
    with mode:
        toy, x = Toy(), torch.ones(2, 3)
    return private.joint_graph(mode, toy, [x])


def test_hooks_of_a_parameter_are_listed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert attempt(lambda: _torch_hooks.gradient_hooks(parameter)) == ()
    assert not attempt(lambda: private.has_accumulation_hooks(parameter))
    handle = parameter.register_hook(repr)  # type: ignore[no-untyped-call]
    parameter.register_hook(print)  # type: ignore[no-untyped-call]
    assert len(_torch_hooks.gradient_hooks(parameter)) == 2
    handle.remove()
    assert _torch_hooks.gradient_hooks(parameter) == (print,)
    parameter.register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]
    assert private.has_accumulation_hooks(parameter)


def test_placeholders_and_outputs_are_described() -> None:
    joint = attempt(graph)
    assert [p.parameter for p in joint.placeholders if p.parameter] == [
        "one.weight", "one.bias", "two.weight"
    ]  # fmt: skip
    assert [p.buffer for p in joint.placeholders if p.buffer] == ["count"]
    assert [p.position for p in joint.placeholders if p.position is not None] == [0]
    assert sum(p.is_tangent for p in joint.placeholders) == 1
    assert [name for name, _ in joint.gradients] == ["one.weight", "one.bias", "two.weight"]
    assert [name for name, _ in joint.mutations] == ["count"]


def test_nodes_have_their_direction_and_annotation() -> None:
    joint = attempt(graph)
    nodes = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    forward = [node for node in nodes if not private.is_backward(node)]
    backward = [node for node in nodes if private.is_backward(node)]
    assert forward
    assert backward
    assert [str(n.target) for n in forward if private.annotation_of(n) == "first"][-1] == (
        "aten.addmm.default"
    )
    assert any(private.annotation_of(node) == "first" for node in backward)


def test_sums_of_gradients_are_marked() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.weight).sin() * self.weight).sum()

    def trace() -> private.TracedGraph:
        mode = private.fake_mode()
        with mode:
            module, x = Twice(), torch.ones(3)
        return private.joint_graph(mode, module, [x])

    nodes = attempt(trace).module.graph.nodes
    sums = [node for node in nodes if private.is_gradient_sum(node)]
    assert [str(node.target) for node in sums] == ["aten.add.Tensor"]


def test_reads_of_values_raise_different_exceptions() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sum() if x.sum() > 0 else self.weight.prod()

    mode = private.fake_mode()
    with mode:
        module, x = Asks(), torch.ones(3)
    with pytest.raises(private.DATA_DEPENDENT):
        private.joint_graph(mode, module, [x])


def test_functions_of_tensors_are_described() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (x * y).clone(), (y > 0).clone()

    def trace() -> private.FunctionGraph:
        mode = private.fake_mode()
        with mode:
            x, y = torch.ones(3, requires_grad=True), torch.ones(3)
        return private.function_graph(mode, Halves(), [x, y])

    graph = attempt(trace)
    assert [str(node.target) for node in graph.outputs] == ["aten.clone.default"] * 2
    assert [node is not None for node in graph.tangents] == [True, False]
    assert [node is not None for node in graph.gradients] == [True, False]
    assert not private.operator_context()[3]


def test_modes_of_functions_are_listed() -> None:
    class Mode(TorchFunctionMode):
        pass

    with Mode() as outer, Mode() as inner:
        assert attempt(lambda: list(private.function_modes())[-2:]) == [outer, inner]
