"""Traces a model's forward and backward into one joint graph, without allocating any weights.

``model()`` runs under ``torch.device("meta")``; its parameters and buffers are then replaced by fake tensors on the CPU
device. The graph names no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.config.precision import FloatName
from zeroir.config.shapes import BatchShapes
from zeroir.errors import InternalError, UserError, ZeroirError
from zeroir.frontend._torch_private import (
    DATA_DEPENDENT,
    InputChangedError,
    ParameterChangedError,
    TracedGraph,
    UnknownDescriptorError,
    asks_for_data,
    fake_mode,
    is_higher_order,
    is_on_another_device,
    joint_graph,
    tracer_settings,
)
from zeroir.frontend.capture.block_reuse import make_plan
from zeroir.frontend.capture.code_contexts import (
    Checkpoint,
    line_of_caller,
    note_on_autocasts,
    noting_autocasts,
)
from zeroir.frontend.capture.gradient_hooks import ParameterHooks
from zeroir.frontend.capture.joint_graph import InputKind, JointGraph, JointInput
from zeroir.frontend.capture.loss_and_outputs import UnknownOutputError
from zeroir.frontend.capture.loss_step import LossStep
from zeroir.frontend.capture.module_tensors import (
    TensorInfo,
    become_fake,
    register_plain_tensors,
    tensor_info,
)
from zeroir.frontend.capture.node_origins import origin_of
from zeroir.frontend.capture.outside_tensors import OutsideTensors
from zeroir.frontend.capture.precision import apply_precision, compute_dtype, note_on_precision
from zeroir.frontend.capture.python_state import PythonState, UsersCode
from zeroir.frontend.capture.read_graph import read_graph, without_dead_nodes
from zeroir.frontend.capture.shapes import dim_env, sizes_of
from zeroir.frontend.capture.shared_memory import (
    note_on_ties,
    overlapping_tensors,
    require_apart,
    tie_equal_tensors,
)
from zeroir.frontend.capture.smallest_sizes import (
    Traces,
    assumptions_first,
    narrowed_dims,
)
from zeroir.frontend.capture.state_check import note_on_state
from zeroir.frontend.source.source import (
    ModelSource,
    capitalised,
    parameter_shapes,
    require_same_parameters,
)
from zeroir.frontend.source.source_lines import line_of_module, refusals_at
from zeroir.frontend.source.unsupported import MAKE_PART_OF_MODEL, require_supported
from zeroir.frontend.watch.code_state import CodeState
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.ir.analysis.instances import with_other_sizes
from zeroir.ir.limits import LONGEST_NAME, obeyed_character
from zeroir.ir.program import ConstantBinding
from zeroir.ir.sizes import Dim
from zeroir.torch_ops.batches import Batch, BatchLeaves, flatten
from zeroir.torch_ops.conditions import tracing_conditions
from zeroir.torch_ops.followed_numbers import FollowedNumbers
from zeroir.torch_ops.purity import ImpureOperatorError

MAX_DROPOUT_SITES = 65536

FEWEST_EQUAL_CALLS = 4
"""With fewer equal calls of blocks, tracing one of them separately saves no time."""

_MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEvaluation:
    """The graph of an evaluation; ``sites`` and ``reused_blocks`` are as for a model."""

    joint: JointGraph
    sites: int
    reused_blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A traced model. ``module`` is the model itself, with fake tensors; ``sites`` counts its calls of dropout.

    ``batch`` and ``constants`` are the tensors and constants of the example batch, and ``example`` has its tensors by
    path. ``reused_blocks`` names the blocks whose calls were not traced one by one, in the order of the calls.
    ``checkpoints`` are the model's activation checkpoints, ``numbers`` those of the user's code that are followed.
    ``notes`` are sentences on effects of the model's code that a program does not have. ``narrowings`` say which lines
    let sizes decide, so that dims are narrowed.
    """

    joint: JointGraph
    module: nn.Module
    parameters: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    batch: tuple[TensorInfo, ...]
    example: Mapping[str, Tensor]
    constants: tuple[ConstantBinding, ...]
    sites: int
    reused_blocks: tuple[str, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    notes: tuple[str, ...] = ()
    narrowings: tuple[str, ...] = ()
    evaluation: CapturedEvaluation | None = None
    numbers: FollowedNumbers | None = None

    @property
    def outside(self) -> dict[str, Tensor]:
        """The tensors of the user's code, outside the model, by the names of their constants."""
        joints = [self.joint, *([] if self.evaluation is None else [self.evaluation.joint])]
        return {x.name: x.outside for j in joints for x in j.inputs if x.outside is not None}

    @property
    def most_sites(self) -> int:
        """The number of seeds that a micro-step or an evaluation needs."""
        return max(self.sites, 0 if self.evaluation is None else self.evaluation.sites)


def capture(
    source: ModelSource,
    precision: FloatName,
    keep_fp32: Sequence[str],
    *,
    evaluate: bool = True,
    outputs: Sequence[str] = (),
    fewest_equal_calls: int = FEWEST_EQUAL_CALLS,
    shapes: BatchShapes = MappingProxyType({}),
    numbers: FollowedNumbers | None = None,
) -> CapturedModel:
    """Trace a model: a step and, with ``evaluate``, an evaluation with the outputs of these names.

    Where at least ``fewest_equal_calls`` calls of blocks are equal, only one of them is traced; the result is the same.
    Tensors of the batch that ``shapes`` names have sizes that depend on dims. ``numbers`` are those in the user's code
    that the program follows, as ``capture_with_numbers`` has put them there.

    Raises:
        UserError: if the model cannot be built or traced; it names the line and a remedy.
    """
    names = source.names
    example = source.batch()
    with refusals_at(names.batch_line):
        leaves = _checked_leaves(example, names.batch)
        tensors = leaves.tensors
        batch = tuple(tensor_info(f"input {path}", path, x) for path, x in tensors.items())
        env, sizes = dim_env(shapes, {info.name: info.shape for info in batch})
        batch = tuple(replace(info, shape=sizes[info.name]) for info in batch)
    autocasts = dict(source.autocasts)
    folder = source.folder
    noting = noting_autocasts(autocasts, lambda: line_of_caller(folder))
    with refusals_at(names.batch_line):
        _require_no_autocast()
    # A caller may be in inference mode, in which nothing has a gradient.
    with noting, torch.inference_mode(False), ExitStack() as at_the_end:
        model = _built(source)
        place = line_of_module(model, "") or names.maker_line
        with refusals_at(place):
            ties = tie_equal_tensors(model)
            hooks = ParameterHooks(model)
            register_plain_tensors(model)
            overlapping = overlapping_tensors(model)
        on_precision = note_on_precision(model, precision, names.model)
        apply_precision(model, precision, keep_fp32)
        mode = fake_mode(env)
        with refusals_at(place):
            parameters, buffers = become_fake(model, mode)
        shapes = parameter_shapes(model)
        functions = (source.loss, source.weight, *hooks.functions)
        code = UsersCode(modules=source.modules, functions=functions)
        state = PythonState.of(model, code)
        at_the_end.callback(state.restore_exactly)
        step = LossStep(model, source, example, compute_dtype(precision), hooks, state)
        reached = ReachedCode.of(model, functions)
        step.outside = OutsideTensors(CodeState.of(None, reached).tensors, numbers)
        if numbers is not None and numbers.values:
            # Calls of blocks with different numbers are not equal.
            step.blocks = ()

        def joint_graph_of_a_step(
            values: Mapping[Dim, int] = MappingProxyType({}),
        ) -> tuple[JointGraph, tuple[str, ...]]:
            """Return the joint graph, where some dims have these values, and the blocks that were reused."""
            with mode:
                inputs = [
                    torch.empty(sizes_of(info.shape, env, values), dtype=x.dtype)
                    for info, x in zip(batch, tensors.values(), strict=True)
                ]
                inputs.append(torch.empty(MAX_DROPOUT_SITES, dtype=torch.int64))
            with assumptions_first(env, step.place):
                return _joint_graph(source, mode, step, inputs, list(tensors), fewest_equal_calls)

        joint, reused_blocks = joint_graph_of_a_step()
        with refusals_at(step.line):
            require_same_parameters(model, shapes, f"forward of {names.model}", names.maker)
        # These belong to the first forward, and checking the state runs another one.
        checkpoints, sites = tuple(step.tracker.checkpoints), step.sites
        notes = [
            _note_on_eval_mode(source, model),
            on_precision,
            note_on_ties(ties),
            note_on_autocasts(autocasts),
            hooks.note(),
        ]
        with refusals_at(step.line):
            note = note_on_state(joint, model, mode, step, lambda: joint_graph_of_a_step()[0])
        notes.append(note)
        evaluation: CapturedEvaluation | None = None
        narrowings: tuple[str, ...] = ()
        if evaluate:
            evaluation, why_not = _evaluation(joint, step, outputs, joint_graph_of_a_step)
            notes.append(why_not)
        if env is not None:

            def traces_at(values: Mapping[Dim, int]) -> Traces:
                at_values = partial(joint_graph_of_a_step, values)
                other = (
                    None if evaluation is None else _evaluation(joint, step, outputs, at_values)[0]
                )
                return at_values()[0], None if other is None else other.joint

            traces = (joint, None if evaluation is None else evaluation.joint)
            narrowed = narrowed_dims(env, traces, traces_at, step.place)
            if narrowed:
                sizes_of_dims = {dim: each.dim.size for dim, each in narrowed.items()}
                narrowings = tuple(each.reason for each in narrowed.values())
                notes += [
                    each.note(_IN_FILE if source.file is not None else _IN_SCRIPT)
                    for each in narrowed.values()
                ]
                joint, evaluation, batch = with_other_sizes(
                    (joint, evaluation, batch), lambda size: size.replaced(sizes_of_dims)
                )
    with refusals_at(place):
        require_apart(joint, overlapping)
    return CapturedModel(
        joint=joint,
        module=model,
        parameters=parameters,
        buffers=buffers,
        batch=batch,
        example=tensors,
        constants=tuple(
            ConstantBinding(path=path, value=value) for path, value in leaves.constants.items()
        ),
        sites=sites,
        reused_blocks=reused_blocks,
        checkpoints=checkpoints,
        notes=tuple(note for note in notes if note is not None),
        narrowings=narrowings,
        evaluation=evaluation,
        numbers=numbers,
    )


_IN_FILE = "Batches of other sizes are refused: give it that range, or express the code without a decision."
_IN_SCRIPT = (
    "An engine that is made in this script compiles another program when it meets other sizes; one that is made from "
    "a file of this program refuses them."
)


def _evaluation(
    joint_of_step: JointGraph,
    step: LossStep,
    outputs: Sequence[str],
    capture_graph: Callable[[], tuple[JointGraph, tuple[str, ...]]],
) -> tuple[CapturedEvaluation | None, str | None]:
    """Return the graph of an evaluation, or None and a sentence where the model cannot be captured under ``eval()``.

    Raises:
        UserError: if an output that the user requests does not exist.
    """
    try:
        with step.evaluating(outputs):
            joint, reused_blocks = capture_graph()
            sites = step.sites
    except UnknownOutputError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's own eval() may raise any error
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return None, (
            f"The program cannot evaluate, because the model cannot be captured under eval(): {reason}"
        )
    # An evaluation must not change the state.
    joint = without_dead_nodes(replace(joint, mutations=()))
    joint = replace(joint, inputs=tuple(_named_alike(joint, joint_of_step)))
    return CapturedEvaluation(joint=joint, sites=sites, reused_blocks=reused_blocks), None


def _named_alike(joint: JointGraph, joint_of_step: JointGraph) -> Iterator[JointInput]:
    """Yield the inputs of an evaluation, whose constants have the names of equal ones in the step, or new ones."""

    def key(item: JointInput, graph: JointGraph) -> tuple[object, ...]:
        return item.data, graph.types[item.value], id(item.outside)

    of_step = [item for item in joint_of_step.inputs if item.kind is InputKind.CONSTANT]
    names = {key(item, joint_of_step): item.name for item in of_step}
    taken = set(names.values())
    for item in joint.inputs:
        if item.kind is not InputKind.CONSTANT:
            yield item
            continue
        new = (name for i in count() if (name := f"constant.{i}") not in taken)
        name = names.get(key(item, joint)) or next(new)
        taken.add(name)
        yield replace(item, name=name)


def _joint_graph(
    source: ModelSource,
    mode: FakeTensorMode,
    step: LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
    fewest_equal_calls: int,
) -> tuple[JointGraph, tuple[str, ...]]:
    """Return the joint graph of a step as plain data, and the blocks whose calls were not traced one by one."""
    if len(step.blocks) >= fewest_equal_calls:
        with_reuse = _with_reuse(mode, step, inputs, paths, fewest_equal_calls)
        if with_reuse is not None:
            return with_reuse
    step.plan = None
    graph = _traced(source, mode, step, inputs, paths)
    joint = read_graph(
        graph,
        paths,
        LossStep.PREFIX,
        step.place,
        outputs=step.output_paths,
        outside=step.outside,
    )
    return joint, ()


def _with_reuse(
    mode: FakeTensorMode,
    step: LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
    fewest_equal_calls: int,
) -> tuple[JointGraph, tuple[str, ...]] | None:
    """Return the same as ``_joint_graph``, but trace equal blocks once; None if that is impossible or no faster."""
    try:
        with tracing_conditions(step.checkpointing):
            with tracer_settings(mode):
                recording = step.record(inputs)
            plan = step.plan = make_plan(recording, mode, fewest_equal_calls)
            for _ in range(_MOST_ATTEMPTS):
                if not plan.graphs:
                    return None
                graph = joint_graph(mode, step, inputs)
                if not plan.mismatches:
                    joint = read_graph(
                        graph,
                        paths,
                        LossStep.PREFIX,
                        step.place,
                        plan,
                        step.output_paths,
                        step.outside,
                    )
                    return joint, plan.reused_blocks
                plan.drop_mismatches()
    except (Exception, SystemExit):  # noqa: BLE001 - tracing without reuse raises any error of the model again
        return None
    return None


def _built(source: ModelSource) -> nn.Module:
    """Return the module on the meta device; on the CPU where its constructor needs the values of tensors."""
    try:
        with torch.device("meta"):
            model = source.build()
    except UserError:
        model = source.build()
    return require_supported(model, source.names)


def _require_no_autocast() -> None:
    """Raise a UserError if the caller compiles within autocast, which would not apply to training steps outside it."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise UserError(
                f"A model is compiled within torch.autocast('{device}'), which is no part of it: leave that block and "
                "compile with precision='bf16' or 'fp16', or enter autocast in forward or in the loss function."
            )


def _note_on_eval_mode(source: ModelSource, model: nn.Module) -> str | None:
    """Return a sentence on a model that is entirely in evaluation mode, as from_pretrained of Hugging Face makes it."""
    if any(module.training for module in model.modules()):
        return None
    return (
        f"{capitalised(source.names.model)} is in evaluation mode, and so is the program: dropout is off, and running "
        "statistics stay as they are; call its train() before compiling unless this is meant."
    )


def _checked_leaves(example: Batch, name: str) -> BatchLeaves:
    """Return the tensors and constants of an example batch; UserError if it has no tensor or is not a batch."""
    leaves = flatten(example, name)
    if not leaves.tensors:
        raise UserError(
            f"{capitalised(name)} has no tensor; it must be a tensor, or a tuple, dict or dataclass with tensors in it."
        )
    for path, value in leaves.constants.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(
                f"The constant {path} of {name} is {value}, which needs more than 64 bits."
            )
        if isinstance(value, str) and (len(value) > LONGEST_NAME or obeyed_character(value)):
            raise UserError(
                f"The constant {path} of {name} is a text that no program holds, because it is longer than "
                f"{LONGEST_NAME} characters or has several lines: leave it out, or use a shorter one."
            )
    return leaves


def _traced(
    source: ModelSource,
    mode: FakeTensorMode,
    step: LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
) -> TracedGraph:
    try:
        with tracing_conditions(step.checkpointing):
            return joint_graph(mode, step, inputs)
    except ZeroirError:
        raise
    except ImpureOperatorError as error:
        raise UserError(
            f"{capitalised(source.place_of(error))} uses the operator {error.op}, which {error.breach}."
        ) from None
    except DATA_DEPENDENT as error:
        raise _depends_on_values(error, source) from None
    except InputChangedError as error:
        place = origin_of(error.node).source or step.place
        raise UserError(
            f"{place} changes the model's input {paths[error.position]} in place; clone it first."
        ) from None
    except ParameterChangedError as error:
        place = origin_of(error.node).source or step.place
        raise UserError(
            f"{place} changes the model's parameter {error.name.removeprefix(step.PREFIX)} in place "
            "during forward, which only the optimizer may do."
        ) from None
    except UnknownDescriptorError as error:
        raise InternalError(f"tracing {source.names.model} failed: {error}") from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the model or of torch
        if is_on_another_device(error):
            raise UserError(
                f"{capitalised(source.place_of(error))} uses a tensor that is not a parameter or buffer of the model: "
                f"{MAKE_PART_OF_MODEL}."
            ) from None
        if is_higher_order(error):
            raise UserError(
                f"{capitalised(source.place_of(error))} uses a higher-order operator such as torch.cond or "
                "flex_attention, which zeroir cannot trace; express it with tensor operations such as torch.where."
            ) from None
        if asks_for_data(error):
            raise _depends_on_values(error, source) from None
        raise UserError(
            source.explain(error, f"{capitalised(source.names.loss)} cannot be traced")
        ) from None


def _depends_on_values(error: BaseException, source: ModelSource) -> UserError:
    return UserError(
        f"{capitalised(source.place_of(error))} uses the values of a tensor to decide what to do or what shape to make "
        f"({_operator(error)}); a program is compiled once for all values, so express it with tensor operations such "
        "as torch.where."
    )


def _operator(error: BaseException) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else type(error).__name__
