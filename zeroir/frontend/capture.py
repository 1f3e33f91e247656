"""Trace a model's forward and backward into one joint graph, without allocating a weight.

``model()`` runs under ``torch.device("meta")``; its parameters and buffers are then replaced by fake tensors that
claim to lie on the CPU, and the graph names no device.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import InternalError, UserError, ZeroirError
from zeroir.frontend import _torch_private
from zeroir.frontend._torch_private import (
    DATA_DEPENDENT,
    HIGHER_ORDER,
    InputChangedError,
    JointGraph,
    ParameterChangedError,
    fake_mode,
    joint_graph,
)
from zeroir.frontend.entry import ModelFile, explain, where
from zeroir.frontend.joint import Joint
from zeroir.frontend.precision import Precision, apply_precision, cast_floating, compute_dtype
from zeroir.frontend.read_graph import read_graph
from zeroir.frontend.tracking import Tracker
from zeroir.ir.dtypes import DType
from zeroir.torch_ops.neutral import NeutralOps, inlined_checkpoints
from zeroir.torch_ops.types import IR_DTYPE

MAX_DROPOUT_SITES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A parameter, buffer or batch tensor; ``aliases`` are the other names of a tied parameter."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A traced model. ``sites`` counts its calls of dropout; ``module`` is the model itself, of fake tensors."""

    joint: Joint
    module: nn.Module
    parameters: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    batch: tuple[TensorInfo, ...]
    sites: int


def capture(model_file: ModelFile, precision: Precision, keep_fp32: Sequence[str]) -> Captured:
    """Trace the model of a file.

    Raises:
        UserError: where the model cannot be built or traced, naming the line and what to do.
    """
    example = model_file.batch()
    leaves = flatten_batch(example, str(model_file.path))
    with torch.device("meta"):
        model = model_file.model()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{model_file.name}() in {model_file.path} returned {type(model).__name__}; it must return a "
            "torch.nn.Module whose forward returns the loss."
        )
    _register_plain_tensors(model)
    apply_precision(model, precision, keep_fp32)
    mode = fake_mode()
    parameters, buffers = _become_fake(model, mode)
    tracker = Tracker(folder=model_file.path.parent, stop=__file__)
    step = _LossStep(model, example, tracker, compute_dtype(precision))
    with mode:
        inputs = [torch.empty(x.shape, dtype=x.dtype) for x in leaves.values()]
        inputs.append(torch.empty(MAX_DROPOUT_SITES, dtype=torch.int64))
    graph = _traced(model_file, mode, step, inputs, list(leaves))
    batch = tuple(_info(f"input {path}", path, x) for path, x in leaves.items())
    joint = read_graph(graph, [info.name for info in batch], _LossStep.PREFIX)
    return Captured(
        joint=joint,
        module=model,
        parameters=parameters,
        buffers=buffers,
        batch=batch,
        sites=step.sites,
    )


def flatten_batch(batch: object, path: str) -> dict[str, Tensor]:
    """The tensors of a batch by their place in it: ``0`` in a tuple, ``tokens`` in a dict, ``images.0`` in both.

    Raises:
        UserError: where something in it is no tensor.
    """
    if isinstance(batch, Tensor):
        return {"0": batch}
    found: dict[str, Tensor] = {}
    _collect(batch, "", found, path)
    if not found:
        raise UserError(
            f"batch() in {path} returned no tensor; it must return a tuple or dict of tensors."
        )
    return found


def _children(value: object) -> list[tuple[str, object]] | None:
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(str(i), item) for i, item in enumerate(value)]
    return None


def _collect(value: object, at: str, found: dict[str, Tensor], path: str) -> None:
    if isinstance(value, Tensor):
        found[at] = value
        return
    children = _children(value)
    if children is None:
        place = f"its element {at}" if at else "it"
        raise UserError(
            f"batch() in {path} must return a tuple or dict of tensors, but {place} is of type "
            f"{type(value).__name__}."
        )
    for key, item in children:
        _collect(item, f"{at}.{key}" if at else key, found, path)


def _rebuilt(value: object, tensors: list[Tensor]) -> object:
    """The structure of a batch with other tensors; takes them from the front of the list."""
    if isinstance(value, Tensor):
        return tensors.pop(0)
    if isinstance(value, Mapping):
        return {key: _rebuilt(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_rebuilt(item, tensors) for item in value)
    return value


class _LossStep(nn.Module):
    """The model as a function from the tensors of a batch and the dropout seeds to an FP32 scalar."""

    PREFIX = "model."

    def __init__(
        self, model: nn.Module, example: object, tracker: Tracker, dtype: torch.dtype
    ) -> None:
        super().__init__()
        tracker.follow(model)
        self.model = model
        self.sites = 0
        self._example = example
        self._tracker = tracker
        self._dtype = dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        self._tracker.restart()
        *tensors, seeds = inputs
        mode = NeutralOps(seeds, self._tracker.around)
        with mode:
            if self._dtype is not torch.float32:
                tensors = [cast_floating(x, self._dtype) for x in tensors]  # type: ignore[misc]
            batch = _rebuilt(self._example, list(tensors))
            buffers = dict(_buffers(self.model))
            loss = loss_of(call_with(self.model, batch)).float()
            _keep_buffers(self.model, buffers)
        self.sites = mode.sites
        return loss


def _buffers(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer


def _keep_buffers(model: nn.Module, before: Mapping[tuple[nn.Module, str], Tensor]) -> None:
    """Turn ``self.count = self.count + 1`` into a change of the buffer that the program knows."""
    for (module, name), new in list(_buffers(model)):
        old = before.get((module, name))
        if old is not None and old is not new:
            with torch.no_grad():
                module._buffers[name] = old.copy_(new)


def call_with(model: nn.Module, batch: object) -> object:
    """Call a model on a batch: a dict gives keyword arguments, a tuple positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def loss_of(output: object) -> Tensor:
    """The loss in what a forward returns: a scalar, or an object or dict that has one called ``loss``.

    Raises:
        UserError: where there is none.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UserError(
            "The model's forward must return the loss: a scalar tensor, or an object or dict with a tensor "
            f"called loss; it returned {type(output).__name__}"
            + ("." if loss is output else f" whose loss is {type(loss).__name__}.")
        )
    if loss.numel() != 1:
        raise UserError(
            f"The model's loss must be one number, but it has the shape {tuple(loss.shape)}; take its mean or "
            "sum in forward."
        )
    if not loss.dtype.is_floating_point:
        raise UserError(
            f"The model's loss must be a floating-point number, but it is {loss.dtype}."
        )
    if not loss.requires_grad:
        raise UserError("The model's loss does not depend on any trainable parameter.")
    return loss.reshape(())


def _traced(
    model_file: ModelFile,
    mode: FakeTensorMode,
    step: _LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
) -> JointGraph:
    path = model_file.path
    try:
        with inlined_checkpoints(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return joint_graph(mode, step, inputs)
    except ZeroirError:
        raise
    except DATA_DEPENDENT as error:
        line = where(error, path) or str(path)
        raise UserError(
            f"{line} uses the values of a tensor to decide what to do or what shape to make "
            f"({_operator(error)}); a program is compiled once for all values, so express it with tensor "
            "operations such as torch.where."
        ) from None
    except HIGHER_ORDER as error:
        line = where(error, path) or str(path)
        raise UserError(
            f"{line} uses a higher-order operator such as torch.cond, which zeroir cannot look into; express it "
            "with tensor operations such as torch.where."
        ) from None
    except InputChangedError as error:
        raise UserError(
            f"The model in {path} changes its input {paths[error.position]} in place; clone it first."
        ) from None
    except ParameterChangedError as error:
        raise UserError(
            f"The model in {path} changes its parameter {str(error).removeprefix(step.PREFIX)} in place "
            "during forward, which only the optimizer may do."
        ) from None
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if innermost == _torch_private.__file__:
            raise InternalError(
                f"tracing {path} failed: {type(error).__name__}: {error}"
            ) from error
        raise UserError(explain(error, path, "The model's forward cannot be traced")) from None


def _operator(error: Exception) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else type(error).__name__


def _register_plain_tensors(model: nn.Module) -> None:
    """Tensors kept as plain attributes become buffers, so that they have a name and a value at run time."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _become_fake(
    model: nn.Module, mode: FakeTensorMode
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Replace every parameter and buffer; return them by their first name."""
    parameters: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    fakes: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    buffers = dict(model.named_buffers())
    infos = (
        tuple(
            _info(f"parameter {names[0]}", names[0], found[key], tuple(names[1:]))
            for key, names in parameters.items()
        ),
        tuple(_info(f"buffer {name}", name, buffer) for name, buffer in buffers.items()),
    )
    with mode:
        for module in model.modules():
            for name, parameter_or_none in module._parameters.items():
                if parameter_or_none is not None:
                    old: Tensor = parameter_or_none
                    if id(old) not in fakes:
                        fake = torch.empty(old.shape, dtype=old.dtype)
                        fakes[id(old)] = nn.Parameter(fake, requires_grad=old.requires_grad)
                    module._parameters[name] = fakes[id(old)]  # type: ignore[assignment]
            for name, buffer_or_none in module._buffers.items():
                if buffer_or_none is not None:
                    old = buffer_or_none
                    found[id(old)] = old
                    if id(old) not in fakes:
                        fakes[id(old)] = torch.empty(old.shape, dtype=old.dtype)
                    module._buffers[name] = fakes[id(old)]
    return infos


def _info(what: str, name: str, tensor: Tensor, aliases: tuple[str, ...] = ()) -> TensorInfo:
    if tensor.dtype not in IR_DTYPE:
        raise UserError(f"The {what} is {tensor.dtype}, an element type that programs do not have.")
    return TensorInfo(
        name=name, dtype=IR_DTYPE[tensor.dtype], shape=tuple(tensor.shape), aliases=aliases
    )
