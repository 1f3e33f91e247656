"""The parts of torch that the frontend uses and that torch may change: the one module to adapt to a new torch.

* ``joint_graph`` and ``function_graph``: AOTAutograd's joint export, its descriptors, and fx's node metadata;
* ``DATA_DEPENDENT``, ``is_on_another_device``, ``changes_outside`` and ``is_higher_order``: the exceptions that torch
  raises where code reads the data of a traced tensor, uses a tensor that is not the model's or writes to it, or passes
  a function to an operator such as ``torch.cond``;
* ``autograd_functions_replaced``: a replacement for every call of a ``torch.autograd.Function``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from zeroir.frontend._torch_dim_nodes import sizes_as_nodes
from zeroir.frontend._torch_dim_views import DimTensorMode
from zeroir.frontend._torch_hooks import GradientHook, gradient_hooks
from zeroir.frontend.capture.storage_views import rewrite_storage_views
from zeroir.torch_ops._torch_device_tensors import DeviceTensorMode, tensors_of
from zeroir.torch_ops.replaced.interpolation import interpolate

Function = Callable[..., object]
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def asks_for_data(error: BaseException) -> bool:
    """Return whether torch raised an exception because its C++ code read a tensor without data.

    Where sizes are symbols, a number of elements that depends on data is an unknown one.
    """
    if isinstance(error, AssertionError):
        return "must not be None for symbol u" in str(error)
    return isinstance(error, RuntimeError) and "its data is not allocated yet" in str(error)


def is_on_another_device(error: BaseException) -> bool:
    """Return whether torch raised an exception because a tensor is not on the device of the others.

    A tensor without data that is neither a parameter nor a buffer of the model is on the meta device. Before torch 2.13
    the exception had no class of its own.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _OTHER_DEVICE)


def changes_outside(error: BaseException) -> bool:
    """Return whether torch raised an exception because code wrote a traced value into a tensor without a trace."""
    return isinstance(error, RuntimeError) and "mutating a non-functional tensor" in str(error)


_OTHER_DEVICE = (
    "Expected all tensors to be on the same device",
    "Unhandled FakeTensor Device Propagation",
)


def is_higher_order(error: BaseException) -> bool:
    """Return whether torch raised an exception because a function was passed to an operator."""
    if isinstance(error, UncapturedHigherOrderOpError):
        return True
    # Flex attention raises an error about the CPU before it calls its operator.
    *_, innermost = traceback.extract_tb(error.__traceback__)
    return Path(innermost.filename).name == "flex_attention.py"


def fake_mode(env: ShapeEnv | None = None, device: str = "cpu") -> DeviceTensorMode:
    """Return a mode whose tensors have no data; real tensors that a model holds become constants.

    With ``env`` its tensors may have sizes that depend on dims. Operators produce what those of ``device`` do.
    """
    make = DeviceTensorMode if env is None else DimTensorMode
    return make(env, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """An input of the joint graph; exactly one of the fields after ``node`` is set.

    ``parameter`` and ``buffer`` are fully-qualified names, ``position`` an argument of the module.
    """

    node: torch.fx.Node
    parameter: str | None = None
    buffer: str | None = None
    position: int | None = None
    is_tangent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A traced forward and backward: ``gradients`` by parameter name, ``mutations`` by buffer name.

    ``outputs`` are those that the module returned after the loss. A module that runs without gradients has no backward.
    """

    module: torch.fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    loss: torch.fx.Node
    outputs: tuple[torch.fx.Node, ...]
    gradients: tuple[tuple[str, torch.fx.Node], ...]
    mutations: tuple[tuple[str, torch.fx.Node], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionGraph:
    """A traced forward and backward of a function of tensors.

    ``tangents`` are by output, ``gradients`` by input; None if an output or input has no gradient.
    """

    module: torch.fx.GraphModule
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]
    tangents: tuple[torch.fx.Node | None, ...]
    gradients: tuple[torch.fx.Node | None, ...]


class UnknownDescriptorError(Exception):
    """The joint graph has an input or output that the frontend does not know."""


class InputChangedError(Exception):
    """The model changes the input at this position in place; ``node`` computes its new value."""

    def __init__(self, position: int, node: torch.fx.Node) -> None:
        super().__init__(position)
        self.position = position
        self.node = node


class ParameterChangedError(Exception):
    """The model changes the parameter of this name in place; ``node`` computes its new value."""

    def __init__(self, name: str, node: torch.fx.Node) -> None:
        super().__init__(name)
        self.name = name
        self.node = node


def joint_graph(mode: FakeTensorMode, module: nn.Module, inputs: Sequence[Tensor]) -> TracedGraph:
    """Trace forward and backward of a module of fake parameters that returns a scalar, followed by outputs."""
    return _with_descriptors(_exported(mode, module, inputs))


def function_graph(
    mode: FakeTensorMode, module: nn.Module, inputs: Sequence[Tensor]
) -> FunctionGraph:
    """Trace forward and backward of a module without parameters that returns a tuple of tensors.

    Raises:
        UnknownDescriptorError: if the module changes its inputs or returns views.
    """
    return _as_function(_exported(mode, module, inputs), len(inputs))


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tensor is one of a trace."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


@contextlib.contextmanager
def tracer_settings(mode: FakeTensorMode) -> Iterator[None]:
    """Configure torch for tracing: no warnings, fake tensors, no oneDNN, operators of ``triton_op`` as a whole."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(mode)
        # oneDNN's operators exist only for the CPU.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        # Otherwise the tracer looks into them and finds Triton kernels, which are not operators.
        stack.enter_context(functorch_config.patch(decompose_custom_triton_ops=False))
        # The tracer's tensors ask for the current GPU before any mode can intercept the call.
        stack.enter_context(mock.patch.object(FunctionalTensor, "cuda", _itself))
        stack.enter_context(_quiet("torch._subclasses.fake_tensor"))
        if mode.shape_env is not None:
            stack.enter_context(sizes_as_nodes())
        if isinstance(mode, DeviceTensorMode):
            stack.enter_context(tensors_of(mode.device))
        yield


def _exported(
    mode: FakeTensorMode, module: nn.Module, inputs: Sequence[Tensor]
) -> torch.fx.GraphModule:
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracer_settings(mode))
        stack.enter_context(fx_traceback.preserve_node_meta())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs))
    _drop_checks(joint.graph_module.graph)
    rewrite_storage_views(joint.graph_module.graph)
    return joint.graph_module


def operator_context() -> tuple[object, ...]:
    """Return active modes that change operators: autocast, inference, ``torch.func``, dispatch, saved-tensor hooks."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.is_inference_mode_enabled(),
        torch._C._are_functorch_transforms_active(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


_whole: Function = interpolate


def whole_where_different(func: Function) -> Function:
    """Return a function that calls ``func``, as a whole operator if its decomposition gives other bits."""
    if func is not _whole:
        return func

    def call(*args: object, **kwargs: object) -> object:
        with whole_operators():
            return func(*args, **kwargs)

    return call


def operators_of_trace(is_sized: bool) -> AbstractContextManager[None]:
    """Return the context in which a model is traced; ``is_sized`` says whether a tensor has sizes that depend on dims.

    C++ decompositions of operators take sizes for numbers, those in Python do not.
    """
    return enable_python_dispatcher() if is_sized else whole_operators()


@contextlib.contextmanager
def whole_operators() -> Iterator[None]:
    """Do not decompose operators in Python, such as interpolation, within the block, as eager PyTorch does not."""
    with torch._C._DisablePythonDispatcher():
        yield


def tensors_replaced(
    module: nn.Module, tensors: Mapping[str, Tensor]
) -> AbstractContextManager[None]:
    """Replace a module's parameters and buffers within the block, by fully-qualified name, as a trace does."""
    return stateless._reparametrize_module(module, dict(tensors))


def as_plain_tensors() -> AbstractContextManager[None]:
    """Treat tensors of subclasses as plain ones within the block."""
    return torch._C.DisableTorchFunctionSubclass()


def has_partial_backward_hooks(module: nn.Module) -> bool:
    """Return whether the user's code called the deprecated ``register_backward_hook`` of this module."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is unique among existing storages, even on meta."""
    address: int = tensor.untyped_storage()._cdata
    return address


def copy_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Register the hooks of one tensor on another one."""
    register: Callable[[GradientHook], object] = target.register_hook
    for hook in gradient_hooks(source):
        register(hook)


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Return whether the user's code called ``register_post_accumulate_grad_hook``."""
    return bool(tensor._post_accumulate_grad_hooks)


class AutogradReplacement(Protocol):
    """A function that is called instead of ``apply`` of an autograd function ``cls``."""

    def __call__(
        self, original: Function, cls: type, /, *args: object, **kwargs: object
    ) -> object: ...


@contextlib.contextmanager
def autograd_functions_replaced(replacement: AutogradReplacement) -> Iterator[None]:
    """Call ``replacement(original, cls, *args)`` for each ``cls.apply(*args)`` of an autograd function."""
    original = inspect.getattr_static(torch.autograd.Function, "apply").__func__

    def apply(cls: type, /, *args: object, **kwargs: object) -> object:
        return replacement(original, cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def annotated(func: Function, annotation: Callable[[], object]) -> Function:
    """Return a function that calls ``func`` and annotates its nodes with ``annotation()``."""

    def call(*args: object, **kwargs: object) -> object:
        with fx_traceback.annotate({"zeroir": annotation()}):
            return func(*args, **kwargs)

    return call


def annotation_of(node: torch.fx.Node) -> object | None:
    """Return the annotation of a node; a backward node has that of the forward node that it differentiates."""
    custom: dict[str, object] = node.meta.get("custom") or {}
    return custom.get("zeroir")


def is_backward(node: torch.fx.Node) -> bool:
    """Return whether a node belongs to the backward."""
    return bool(
        node.meta.get("autograd_backward") or node.meta.get("partitioner_tag") == "is_backward"
    )


def is_gradient_sum(node: torch.fx.Node) -> bool:
    """Return whether a node adds two gradients of one value."""
    return bool(node.meta.get("is_gradient_acc"))


def function_modes() -> Sequence[TorchFunctionMode]:
    """Return the modes in which torch functions are called, the outermost first."""
    modes: Sequence[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def _itself(tensor: Tensor, *_: object, **__: object) -> Tensor:
    return tensor


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a logger that prints the traceback of an exception that is raised anyway."""
    logger = logging.getLogger(name)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _drop_checks(graph: torch.fx.Graph) -> None:
    """Remove checks of matrices without a result, such as singular ones; a program computes NaNs instead."""
    for node in reversed(graph.find_nodes(op="call_function", target=with_effects)):
        token, op, *_ = node.args
        if op is torch.ops.aten._linalg_check_errors.default:
            for getitem in list(node.users):
                getitem.replace_all_uses_with(token)
                graph.erase_node(getitem)
            graph.erase_node(node)


def _with_descriptors(module: torch.fx.GraphModule) -> TracedGraph:
    placeholders = tuple(
        _placeholder(node)
        for node in module.graph.find_nodes(op="placeholder")
        if not isinstance(node.meta["desc"], d.ForwardTokenAOTInput | d.BackwardTokenAOTInput)
    )
    (output,) = module.graph.find_nodes(op="output")
    results: dict[int, torch.fx.Node] = {}
    gradients: list[tuple[str, torch.fx.Node]] = []
    mutations: list[tuple[str, torch.fx.Node]] = []
    values: Any = output.args[0]
    for value, desc in zip(values, output.meta["desc"], strict=True):
        match desc:
            case d.PlainAOTOutput(idx=position):
                results[position] = value
            case d.GradAOTOutput(grad_of=d.ParamAOTInput(target=name)):
                if value is not None:
                    gradients.append((name, value))
            case d.InputMutationAOTOutput(mutated_input=d.BufferAOTInput(target=name)):
                mutations.append((name, value))
            case d.InputMutationAOTOutput(mutated_input=d.PlainAOTInput(idx=position)):
                raise InputChangedError(position, value)
            case d.InputMutationAOTOutput(mutated_input=d.ParamAOTInput(target=name)):
                raise ParameterChangedError(name, value)
            case None | d.GradAOTOutput() | d.ForwardTokenAOTOutput() | d.BackwardTokenAOTOutput():
                pass  # the unused gradient of a batch tensor, or the order of checks
            case _:
                raise UnknownDescriptorError(f"an output of the joint graph is {desc}")
    if not results:
        raise UnknownDescriptorError("the joint graph has no output")
    loss, *outputs = (results[position] for position in sorted(results))
    return TracedGraph(
        module=module,
        placeholders=placeholders,
        loss=loss,
        outputs=tuple(outputs),
        gradients=tuple(gradients),
        mutations=tuple(mutations),
    )


def _placeholder(node: torch.fx.Node) -> Placeholder:
    match node.meta["desc"]:
        case d.ParamAOTInput(target=name):
            return Placeholder(node=node, parameter=name)
        case d.BufferAOTInput(target=name):
            return Placeholder(node=node, buffer=name)
        case d.PlainAOTInput(idx=position):
            return Placeholder(node=node, position=position)
        case d.TangentAOTInput():
            return Placeholder(node=node, is_tangent=True)
        case desc:
            raise UnknownDescriptorError(f"an input of the joint graph is {desc}")


def _as_function(module: torch.fx.GraphModule, input_count: int) -> FunctionGraph:
    (output,) = module.graph.find_nodes(op="output")
    results: Any = output.args[0]
    nodes = {node.meta["desc"]: node for node in module.graph.find_nodes(op="placeholder")}
    values = dict(zip(output.meta["desc"], results, strict=True))
    output_count = sum(isinstance(desc, d.PlainAOTOutput) for desc in values)
    inputs = [d.PlainAOTInput(idx=at) for at in range(input_count)]
    outputs = [d.PlainAOTOutput(idx=at) for at in range(output_count)]
    gradients = [d.GradAOTOutput(grad_of=desc) for desc in inputs]
    tangents = [d.TangentAOTInput(output=desc) for desc in outputs]
    unknown = {*nodes, *values} - {None, *inputs, *outputs, *gradients, *tangents}
    if unknown:
        raise UnknownDescriptorError(f"an input or output of a function's graph is {unknown.pop()}")
    return FunctionGraph(
        module=module,
        inputs=tuple(nodes[desc] for desc in inputs),
        outputs=tuple(values[desc] for desc in outputs),
        tangents=tuple(nodes.get(desc) for desc in tangents),
        gradients=tuple(values.get(desc) for desc in gradients),
    )
