"""Trace a model's forward and backward into one joint graph, without allocating a weight.

``model()`` runs under ``torch.device("meta")``; its parameters and buffers are then replaced by fake tensors that
claim to lie on the CPU, and the graph names no device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.errors import InternalError, UserError, ZeroirError
from zeroir.frontend._torch_private import (
    DATA_DEPENDENT,
    UNREGISTERED,
    InputChangedError,
    JointGraph,
    ParameterChangedError,
    UnknownDescriptorError,
    asks_for_data,
    fake_mode,
    is_higher_order,
    joint_graph,
    tracer_settings,
    whole_operators,
)
from zeroir.frontend.block_recording import Blocks, Recorder, Recording
from zeroir.frontend.entry import (
    ModelFile,
    explain,
    parameter_shapes,
    require_same_parameters,
    where,
)
from zeroir.frontend.hooks import ParameterHooks
from zeroir.frontend.joint import Joint
from zeroir.frontend.module_tensors import (
    Lent,
    TensorInfo,
    become_fake,
    lend_buffers,
    register_plain_tensors,
    return_unchanged,
    take_back,
    tensor_info,
)
from zeroir.frontend.precision import Precision, apply_precision, cast_floating, compute_dtype
from zeroir.frontend.python_state import PythonState
from zeroir.frontend.read_graph import read_graph
from zeroir.frontend.regions import Checkpoint, line_of_caller, noting_autocasts, on_autocasts
from zeroir.frontend.replay import Plan, Replayer, make_plan
from zeroir.frontend.second_call import note_on_state
from zeroir.frontend.shared_memory import overlapping_tensors, require_apart
from zeroir.frontend.tracking import Tracker
from zeroir.frontend.units import find_units
from zeroir.torch_ops.batches import strange_kind
from zeroir.torch_ops.conditions import tracing_conditions
from zeroir.torch_ops.neutral import NeutralOps

MAX_DROPOUT_SITES = 65536

FEWEST_EQUAL_CALLS = 4
"""Below this many equal calls of blocks, it is no faster to trace one of them by itself."""

_MOST_REPLAYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A traced model. ``sites`` counts its calls of dropout; ``module`` is the model itself, of fake tensors.

    ``replayed`` names the blocks whose calls were not traced one by one, in the order of the calls. ``checkpoints`` are
    the regions that the model marks to be computed again, and ``notes`` sentences on what its code does and a program
    does not.
    """

    joint: Joint
    module: nn.Module
    parameters: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    batch: tuple[TensorInfo, ...]
    sites: int
    replayed: tuple[str, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    notes: tuple[str, ...] = ()


def capture(
    model_file: ModelFile,
    precision: Precision,
    keep_fp32: Sequence[str],
    *,
    fewest_equal_calls: int = FEWEST_EQUAL_CALLS,
) -> Captured:
    """Trace the model of a file.

    Blocks that do the same, ``fewest_equal_calls`` times or more, are traced once; what comes out is the same.

    Raises:
        UserError: where the model cannot be built or traced, naming the line and what to do.
    """
    example = model_file.batch()
    leaves = flatten_batch(example, str(model_file.path))
    batch = tuple(tensor_info(f"input {path}", path, x) for path, x in leaves.items())
    autocasts = dict(model_file.autocasts)
    folder = model_file.path.parent
    with noting_autocasts(autocasts, lambda: line_of_caller(folder)):
        model = _built(model_file)
        hooks = ParameterHooks(model)
        register_plain_tensors(model)
        overlapping = overlapping_tensors(model)
        apply_precision(model, precision, keep_fp32)
        mode = fake_mode()
        parameters, buffers = become_fake(model, mode)
        shapes = parameter_shapes(model)
        tracker = Tracker(folder=folder, stop=__file__)
        state = PythonState.of(model, model_file.modules)
        step = _LossStep(model, example, tracker, compute_dtype(precision), hooks, state)
        with mode:
            inputs = [torch.empty(x.shape, dtype=x.dtype) for x in leaves.values()]
            inputs.append(torch.empty(MAX_DROPOUT_SITES, dtype=torch.int64))

        def joint_graph_of_a_step() -> tuple[Joint, tuple[str, ...]]:
            return _joint(model_file, mode, step, inputs, list(leaves), fewest_equal_calls)

        joint, replayed = joint_graph_of_a_step()
        forward = f"forward of {model_file.path}"
        require_same_parameters(model, shapes, forward, f"{model_file.name}()")
        checkpoints, idle, sites = tuple(tracker.checkpoints), hooks.note(), step.sites
        kept = note_on_state(joint, model, mode, step, model_file.modules, joint_graph_of_a_step)
    require_apart(joint, overlapping)
    return Captured(
        joint=joint,
        module=model,
        parameters=parameters,
        buffers=buffers,
        batch=batch,
        sites=sites,
        replayed=replayed,
        checkpoints=checkpoints,
        notes=tuple(note for note in (on_autocasts(autocasts), idle, kept) if note is not None),
    )


def _joint(
    model_file: ModelFile,
    mode: FakeTensorMode,
    step: _LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
    fewest_equal_calls: int,
) -> tuple[Joint, tuple[str, ...]]:
    """The joint graph of a step as plain data, and the blocks whose calls were not traced one by one."""
    graph: JointGraph | None = None
    if len(step.blocks.names) >= fewest_equal_calls:
        graph = _replayed(mode, step, inputs, fewest_equal_calls)
    instances = [] if graph is None or step.plan is None else step.plan.instances
    if graph is None:
        step.plan = None
        graph = _traced(model_file, mode, step, inputs, paths)
    joint = read_graph(graph, paths, _LossStep.PREFIX, instances)
    return joint, tuple(each.recording.block for each in instances if each.template is not None)


def _replayed(
    mode: FakeTensorMode, step: _LossStep, inputs: Sequence[Tensor], fewest_equal_calls: int
) -> JointGraph | None:
    """The joint graph with a node for each call of an equal block; None where that cannot be or does not pay."""
    try:
        with tracing_conditions(step.checkpointing):
            with tracer_settings(mode):
                recordings = step.rehearse(inputs)
            step.plan = make_plan(recordings, mode, fewest_equal_calls)
            for _ in range(_MOST_REPLAYS):
                if step.plan.is_empty:
                    return None
                graph = joint_graph(mode, step, inputs)
                if step.plan.has_diverged:
                    return None
                if not step.plan.misfits:
                    return graph
                step.plan.drop_misfits()
    except (Exception, SystemExit):  # noqa: BLE001 - whatever the model or torch raises, they raise without this, too
        return None
    return None


def _built(model_file: ModelFile) -> nn.Module:
    """The module without its memory, or with it where its constructor needs the values of tensors."""
    try:
        with torch.device("meta"):
            model = model_file.build()
    except UserError:
        model = model_file.build()
    _check_trainable(model, f"{model_file.name}() in {model_file.path}")
    return model


def _check_trainable(model: object, maker: str) -> None:
    """UserError where what the user's function made is no module that can be traced and trained."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{maker} returned {type(model).__name__}; it must return a torch.nn.Module whose forward returns the loss."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"{maker} returned a model with TorchScript in it ({name or 'the whole'}), which cannot be traced; "
                "use the Python module that it was made from."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UserError(
                f"The parameter {name} of the model has no shape yet; use a module that is given its sizes in the "
                "place of a lazy one."
            )
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise UserError(
            f"{maker} returned a model without a trainable parameter: none of its parameters requires a gradient."
        )


def flatten_batch(batch: object, path: str) -> dict[str, Tensor]:
    """The tensors of a batch by their place in it: ``0`` in a tuple, ``tokens`` in a dict, ``images.0`` in both.

    Raises:
        UserError: where something in it is no tensor.
    """
    found: dict[str, Tensor] = {}
    if isinstance(batch, Tensor):
        found["0"] = batch
    else:
        _collect(batch, "", found, path)
    if not found:
        raise UserError(
            f"batch() in {path} returned no tensor; it must return a tuple or dict of tensors."
        )
    for place, tensor in found.items():
        if (kind := strange_kind(tensor)) is not None:
            raise UserError(
                f"The input {place} of batch() in {path} is {kind}; batches are dense tensors with values."
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
        if at in found:
            raise UserError(
                f"batch() in {path} has two tensors at {at}; keys with dots in them can be mistaken for nested ones."
            )
        found[at] = value
        return
    children = _children(value)
    if children is None:
        place = f"its element {at}" if at else "it"
        raise UserError(
            f"batch() in {path} must return a tuple or dict of tensors, but {place} is of type "
            f"{type(value).__name__}; what is no tensor belongs into the model."
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
        items = [_rebuilt(item, tensors) for item in value]
        if isinstance(value, list):
            return items
        make: Callable[..., object] | None = getattr(value, "_make", None)  # a named tuple's
        return tuple(items) if make is None else make(items)
    return value


class _LossStep(nn.Module):
    """The model as a function from the tensors of a batch and the dropout seeds to an FP32 scalar."""

    PREFIX = "model."

    def __init__(
        self,
        model: nn.Module,
        example: object,
        tracker: Tracker,
        dtype: torch.dtype,
        hooks: ParameterHooks,
        state: PythonState,
    ) -> None:
        super().__init__()
        tracker.follow(model)
        self.blocks = Blocks(names=tuple(find_units(model, None).labels))
        self.blocks.follow(model)
        self.model = model
        self.sites = 0
        self.plan: Plan | None = None
        self._example = example
        self._tracker = tracker
        self._dtype = dtype
        self._hooks = hooks
        self.state = state

    def forward(self, *inputs: Tensor) -> Tensor:
        self._tracker.restart()
        *tensors, seeds = inputs
        self.state.restore()
        # The tracer's own tensors stand in the places of the parameters.
        self._hooks.attach(self.model)
        neutral = NeutralOps(seeds, self._tracker.around)
        with whole_operators(), neutral, contextlib.ExitStack() as stack:
            if self.plan is not None:
                replayer = Replayer(self.plan, neutral, self._tracker)
                stack.enter_context(self.blocks.watched(replayer))
                stack.enter_context(replayer.own_functions())
                stack.enter_context(replayer)
            lent = lend_buffers(self.model)
            loss = self._loss(tensors)
            take_back(lent)
        self.sites = neutral.sites
        return loss

    def rehearse(self, inputs: Sequence[Tensor]) -> list[Recording]:
        """What each call of a block does, found out without a change of the model's buffers."""
        *tensors, seeds = inputs
        self.state.restore()
        neutral = NeutralOps(seeds)
        known = [*inputs, *self.model.parameters(), *self.model.buffers()]
        recorder = Recorder(neutral, known)
        with whole_operators(), neutral, self.blocks.watched(recorder), recorder.own_functions():
            lent: list[Lent] = []
            try:
                with recorder:
                    lent = lend_buffers(self.model)
                    self._loss(tensors)
            finally:
                return_unchanged(lent)
        return recorder.recordings()

    def checkpointing(self) -> AbstractContextManager[None]:
        """Around what the model's code computes under an activation checkpoint."""
        return self._tracker.checkpoint()

    def _loss(self, tensors: Sequence[Tensor]) -> Tensor:
        given = cast_floating(_rebuilt(self._example, list(tensors)), self._dtype)
        # The loss may be a parameter as it stands.
        return loss_of(call_with(self.model, given)).float().clone()


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
            + (
                f" whose loss is {type(loss).__name__}."
                if loss is not None
                else ", which has none."
            )
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
        with tracing_conditions(step.checkpointing):
            return joint_graph(mode, step, inputs)
    except ZeroirError:
        raise
    except DATA_DEPENDENT as error:
        raise _depends_on_values(error, path) from None
    except UNREGISTERED as error:
        line = where(error, path) or str(path)
        raise UserError(
            f"{line} uses a tensor that the model does not know as a parameter or buffer; keep modules in "
            "nn.ModuleList or nn.ModuleDict and tensors with register_buffer, not in plain lists or dicts."
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
    except UnknownDescriptorError as error:
        raise InternalError(f"tracing {path} failed: {error}") from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the model or torch raises
        if is_higher_order(error):
            raise UserError(
                f"{where(error, path) or path} uses a higher-order operator such as torch.cond or flex_attention, "
                "which zeroir cannot look into; express it with tensor operations such as torch.where."
            ) from None
        if asks_for_data(error):
            raise _depends_on_values(error, path) from None
        raise UserError(explain(error, path, "The model's forward cannot be traced")) from None


def _depends_on_values(error: BaseException, path: Path) -> UserError:
    return UserError(
        f"{where(error, path) or path} uses the values of a tensor to decide what to do or what shape to make "
        f"({_operator(error)}); a program is compiled once for all values, so express it with tensor operations such "
        "as torch.where."
    )


def _operator(error: BaseException) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else type(error).__name__
