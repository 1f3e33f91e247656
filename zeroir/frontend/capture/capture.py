"""Traces a model's forward and backward into one joint graph, without allocating any weights.

``model()`` runs under ``torch.device("meta")``; its parameters and buffers are then replaced by fake tensors. The graph
names no device, and its types are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from zeroir.config.precision import FloatName
from zeroir.config.shapes import BatchShapes
from zeroir.errors import Remainders, ShapesError, UserError
from zeroir.frontend._torch_private import (
    fake_mode,
)
from zeroir.frontend.capture.captured_graph import CapturedGraph, InputKind
from zeroir.frontend.capture.captured_model import CapturedEvaluation, CapturedModel
from zeroir.frontend.capture.code_contexts import (
    line_of_caller,
    note_on_autocasts,
    noting_autocasts,
)
from zeroir.frontend.capture.evaluation import GraphOfStep, evaluation_of, with_stores
from zeroir.frontend.capture.gradient_hooks import ParameterHooks
from zeroir.frontend.capture.graph_of_step import graph_of_step
from zeroir.frontend.capture.loss_step import LossStep
from zeroir.frontend.capture.module_tensors import (
    OtherShapeError,
    become_fake,
    register_plain_tensors,
    tensor_info,
)
from zeroir.frontend.capture.outside_tensors import OutsideTensors
from zeroir.frontend.capture.precision import apply_precision, compute_dtype, note_on_precision
from zeroir.frontend.capture.python_state import PythonState, UsersCode
from zeroir.frontend.capture.shapes import dim_env, sizes_are_integers, sizes_of
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
from zeroir.frontend.capture.state_check import (
    checked_state,
    note_on_stores,
    require_no_clock,
)
from zeroir.frontend.opaque.calls import OpaqueModules
from zeroir.frontend.opaque.choice import NONE, OpaqueChoice, UntraceableError
from zeroir.frontend.opaque.structure import CannotRunError
from zeroir.frontend.source.source import (
    ModelSource,
    capitalised,
    parameter_shapes,
    require_same_parameters,
)
from zeroir.frontend.source.source_lines import line_of_module, refusals_at
from zeroir.frontend.source.unsupported import require_supported
from zeroir.frontend.watch.code_state import CodeState
from zeroir.frontend.watch.outside_modules import replaced_by_copies, stand_ins, tensor_ids
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.stored_tensors import (
    NOTHING_KEPT,
    kept_tensors,
)
from zeroir.ir.analysis.instances import with_other_sizes
from zeroir.ir.limits import LONGEST_NAME, obeyed_character
from zeroir.ir.program import ConstantBinding
from zeroir.ir.sizes import Dim
from zeroir.torch_ops.batches import Batch, BatchLeaves, flatten
from zeroir.torch_ops.followed_numbers import FollowedNumbers
from zeroir.torch_ops.frozen_modules import frozen_modules, users_module
from zeroir.torch_ops.ranks import TracedRanks

MAX_DROPOUT_SITES = 65536

FEWEST_EQUAL_CALLS = 4
"""With fewer equal calls of blocks, tracing one of them separately saves no time."""


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
    opaque: str | None = NONE,
    ranks: int = 1,
    device: str = "cpu",
) -> CapturedModel:
    """Trace a model: a step and, with ``evaluate``, an evaluation with the outputs of these names.

    Where at least ``fewest_equal_calls`` calls of blocks are equal, only one of them is traced; the result is the same.
    Tensors of the batch that ``shapes`` names have sizes that depend on dims. ``numbers`` are those in the user's code
    that the program follows, as ``capture_with_numbers`` has put them there. The code of the modules ``opaque`` runs as
    it is: that of the modules that these patterns match, with None that of the smallest which cannot be traced.
    ``ranks`` is the number of ranks that the code finds. Results have the types that they have on ``device``, which
    need not be there.

    Raises:
        UserError: if the model cannot be built or traced; it names the line and a remedy.
    """
    choice = OpaqueChoice(opaque)
    request = _CaptureRequest(
        source=source,
        precision=precision,
        keep_fp32=keep_fp32,
        evaluate=evaluate,
        outputs=outputs,
        fewest_equal_calls=fewest_equal_calls,
        shapes=shapes,
        numbers=numbers,
        opaque=choice,
        ranks=ranks,
        device=device,
    )
    without: frozenset[str] = frozenset()
    is_whole = False
    while True:
        try:
            return _captured(request, without, is_whole=is_whole)
        except _UnreadAttributes as error:
            without |= error.names
        except (UntraceableError, CannotRunError) as error:
            if without:
                without, is_whole = frozenset(), True
            else:
                choice.include(error)
        except ShapesError as error:
            if not source.runs_what_decides or not error.module or choice.option is not None:
                raise
            choice.include(UntraceableError(str(error), error.module))
        except (Exception, SystemExit):
            # The model's code may ask whether they are there.
            if not without:
                raise
            without, is_whole = frozenset(), True


class _UnreadAttributes(Exception):  # noqa: N818 - the model is captured again without them
    """Attributes with tensors that forward replaces before it reads them."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaptureRequest:
    """The arguments of ``capture``."""

    source: ModelSource
    precision: FloatName
    keep_fp32: Sequence[str]
    evaluate: bool
    outputs: Sequence[str]
    fewest_equal_calls: int
    shapes: BatchShapes
    numbers: FollowedNumbers | None
    opaque: OpaqueChoice
    ranks: int
    device: str


def _captured(
    request: _CaptureRequest, without: frozenset[str], *, is_whole: bool
) -> CapturedModel:
    """Capture without these attributes.

    Raises:
        _UnreadAttributes: if there are others that forward replaces unread, unless the capture ``is_whole``.
    """
    source, precision, numbers = request.source, request.precision, request.numbers
    opaque = request.opaque
    names = source.names
    example = source.batch()
    with refusals_at(names.batch_line):
        leaves = _checked_leaves(example, names.batch)
        tensors = leaves.tensors
        batch = tuple(tensor_info(f"input {path}", path, x) for path, x in tensors.items())
        env, sizes = dim_env(request.shapes, {info.name: info.shape for info in batch})
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
            attributes = register_plain_tensors(model, without)
            overlapping = overlapping_tensors(model)
        on_precision = note_on_precision(model, precision, names.model)
        apply_precision(model, precision, request.keep_fp32)
        mode = fake_mode(env, request.device)
        with refusals_at(place):
            parameters, buffers = become_fake(model, mode)
        parameters_before = parameter_shapes(model)
        opaque_paths = opaque.paths_in(model)
        reasons = {path: opaque.reason_of(path) for path in opaque_paths}
        modules = OpaqueModules(source, reasons, mode, opaque.found)
        of_trace = modules.install(
            model,
            with_loss=opaque.with_loss,
            own_code=opaque.own_code,
            reason_of_own_code=opaque.reason_of_own_code,
        )
        functions = (source.loss, source.weight, *hooks.functions)
        reached = ReachedCode.of(model, functions)
        if request.shapes:
            at_the_end.enter_context(sizes_are_integers(reached.functions))
        # A step has hooks of its own.
        outside = CodeState.of(None, reached)
        known = {*model.modules(), *(source.model().modules() if source.is_in_hand else ())}
        others = tuple(module for module in outside.modules if module not in known)
        code = UsersCode(
            modules=source.modules,
            functions=functions,
            outside=others,
            consumed=tuple(outside.consumed),
        )
        state = PythonState.of(model, code)
        at_the_end.callback(state.restore_exactly)
        is_file = source.file is not None
        # Also where it is not needed: functions that attributes hold are reached so, and a clock in them counts.
        of_model = CodeState.of(model, reached)
        values = of_model.plain_values if is_file else {}
        own = tensor_ids(model) | (tensor_ids(source.model()) if source.is_in_hand else frozenset())
        standing = at_the_end.enter_context(
            stand_ins(outside.modules, own, are_constants=source.has_optimizer)
        )
        frozen = frozen_modules(source.model()) if source.is_in_hand else {}
        replaced = partial(replaced_by_copies, frozen, frozen_modules(model))
        traced = at_the_end.enter_context(ExitStack())
        traced.enter_context(replaced())
        step = LossStep(
            model,
            of_trace,
            example,
            compute_dtype(precision),
            hooks,
            state,
            TracedRanks(request.ranks),
            opaque_paths,
        )
        if env is not None:
            env.running = step.tracker.running
        step.outside = OutsideTensors(outside.tensors, numbers, standing)
        if (numbers is not None and numbers.values) or opaque.own_code is not None:
            # Calls of blocks with different numbers are not equal, and other code is to see what blocks return.
            step.blocks = ()

        def joint_graph_of_a_step(
            values: Mapping[Dim, int] = MappingProxyType({}),
        ) -> GraphOfStep:
            """Return the joint graph, where some dims have these values, and the blocks that were reused."""
            with mode:
                inputs = [
                    torch.empty(sizes_of(info.shape, env, values), dtype=x.dtype)
                    for info, x in zip(batch, tensors.values(), strict=True)
                ]
                inputs.append(torch.empty(MAX_DROPOUT_SITES, dtype=torch.int64))
                inputs.append(torch.empty(1, dtype=torch.int64))
            with assumptions_first(env, step.place):
                return graph_of_step(
                    source, mode, step, inputs, list(tensors), request.fewest_equal_calls
                )

        try:
            joint, reused_blocks = joint_graph_of_a_step()
        except OtherShapeError as error:
            if is_whole or error.name not in attributes:
                raise
            raise _UnreadAttributes(frozenset((error.name,))) from None
        unread = attributes & step.replaced & _unread_buffers(joint)
        if unread and not is_whole:
            raise _UnreadAttributes(unread)
        with refusals_at(step.line):
            require_same_parameters(
                model, parameters_before, f"forward of {names.model}", names.maker
            )
        # These belong to the first forward, and checking the state runs another one.
        checkpoints, sites, places = tuple(step.tracker.checkpoints), step.sites, step.places
        notes = [
            _note_on_eval_mode(source, model),
            on_precision,
            note_on_ties(ties),
            note_on_autocasts(autocasts),
            hooks.note(),
            *opaque.notes(),
        ]
        with refusals_at(step.line):
            changed = checked_state(joint, model, mode, step, lambda: joint_graph_of_a_step()[0])
            if reached.clock_line:
                require_no_clock(joint, model, step, reached, lambda: joint_graph_of_a_step()[0])
        notes.append(changed.note)
        # What is stored in the backward is no value of the forward.
        of_forward = [s for s in changed.stores if source.is_in_hand and s in places]
        (joint, reused_blocks), stored = with_stores(
            step, of_forward, joint_graph_of_a_step, (joint, reused_blocks)
        )
        lost = [store.name for store in changed.stores if store not in step.stores]
        notes.append(note_on_stores(lost) if lost else None)
        evaluation: CapturedEvaluation | None = None
        narrowings: tuple[str, ...] = ()
        remainders: Remainders | None = None
        if request.evaluate:
            evaluation, why_not = evaluation_of(
                joint, step, request.outputs, joint_graph_of_a_step, has_stores=source.is_in_hand
            )
            notes.append(why_not)
            stored += () if evaluation is None else evaluation.stored
        kept = NOTHING_KEPT
        if stored:
            traced.close()
            of_user = PythonState.of(source.model(), code)
            traced.enter_context(replaced())
            kept = kept_tensors(stored, state.containers, of_user.containers)
        if env is not None:

            def traces_at(values: Mapping[Dim, int]) -> Traces:
                at_values = partial(joint_graph_of_a_step, values)
                other = (
                    None
                    if evaluation is None
                    else evaluation_of(
                        joint, step, request.outputs, at_values, has_stores=source.is_in_hand
                    )[0]
                )
                return at_values()[0], None if other is None else other.joint

            traces = (joint, None if evaluation is None else evaluation.joint)
            narrowed = narrowed_dims(env, traces, traces_at, step.place)
            if narrowed:
                sizes_of_dims = {dim: each.dim.size for dim, each in narrowed.items()}
                narrowings = tuple(each.reason for each in narrowed.values())
                remainders = next(
                    filter(None, (each.remainders for each in narrowed.values())), None
                )
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
        notes=tuple(dict.fromkeys(note for note in notes if note is not None)),
        narrowings=narrowings,
        remainders=remainders,
        evaluation=evaluation,
        numbers=numbers,
        values=values,
        kept=kept,
        reads=step.reads,
        opaque=opaque_paths,
        ranks=request.ranks if step.ranks.is_asked else None,
        is_gathering=step.ranks.is_gathering,
    )


def _unread_buffers(joint: CapturedGraph) -> frozenset[str]:
    """Return the names of buffers that get new values in forward, and whose earlier ones nothing reads."""
    used = {
        ref
        for node in joint.nodes
        # A copy takes only the shape of what it overwrites.
        for ref in [*node.refs()][node.op == "aten.copy.default" :]
    }
    read = {
        item.name for item in joint.inputs if item.kind is InputKind.BUFFER and item.value in used
    }
    return frozenset(name for name, _ in joint.mutations) - read


_IN_FILE = (
    "A run of this program compiles another one from the model file when it meets other sizes."
)
_IN_SCRIPT = (
    "An engine that is made in this script compiles another program when it meets other sizes; one that is made from "
    "a file of this program refuses them."
)


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
    if any(module.training for module in users_module(model).modules()):
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
