"""The joint graph of a step as plain data, with blocks that are traced once, and the errors of a trace."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function

from zeroir.errors import InternalError, ShapesError, UserError, ZeroirError
from zeroir.frontend._torch_private import (
    DATA_DEPENDENT,
    InputChangedError,
    ParameterChangedError,
    TracedGraph,
    UnknownDescriptorError,
    asks_for_data,
    changes_outside,
    is_higher_order,
    is_on_another_device,
    joint_graph,
    tracer_settings,
)
from zeroir.frontend.capture.blocks.reuse import make_plan
from zeroir.frontend.capture.captured_graph import CapturedGraph
from zeroir.frontend.capture.loss_step import LossStep
from zeroir.frontend.capture.node_origins import origin_of
from zeroir.frontend.capture.read_graph import read_graph
from zeroir.frontend.opaque.choice import UntraceableError, module_of_error
from zeroir.frontend.source.source import (
    ModelSource,
    capitalised,
)
from zeroir.frontend.source.source_lines import line_of_error
from zeroir.frontend.source.unsupported import MAKE_PART_OF_MODEL
from zeroir.torch_ops.conditions import tracing_conditions
from zeroir.torch_ops.neutral import BackwardCallError, UntracedCallError
from zeroir.torch_ops.purity import ImpureOperatorError
from zeroir.torch_ops.random_numbers import OwnSeedError, own_seeds_refused
from zeroir.torch_ops.ranks import collective_error

_MOST_ATTEMPTS = 3
_OF_AN_EARLIER_CALL = "Unexpected fake buffer"
"""A part of the tracer's error where a tensor of one trace is in the next one."""

_BACKWARD = "_engine_run_backward"
"""The function of torch that runs the backward."""


def graph_of_step(
    source: ModelSource,
    mode: FakeTensorMode,
    step: LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
    fewest_equal_calls: int,
) -> tuple[CapturedGraph, tuple[str, ...]]:
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
        outputs=step.output_names,
        outside=step.outside,
    )
    return joint, ()


def _with_reuse(
    mode: FakeTensorMode,
    step: LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
    fewest_equal_calls: int,
) -> tuple[CapturedGraph, tuple[str, ...]] | None:
    """Return the same as ``graph_of_step``, but trace equal blocks once; None if that is impossible or no faster."""
    try:
        with (
            tracing_conditions(step.checkpointing),
            _gradients_only_returned(),
            _no_ranges(),
            own_seeds_refused(),
        ):
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
                        step.output_names,
                        step.outside,
                    )
                    return joint, plan.reused_blocks
                plan.drop_mismatches()
    except (Exception, SystemExit):  # noqa: BLE001 - tracing without reuse raises any error of the model again
        return None
    return None


def _traced(
    source: ModelSource,
    mode: FakeTensorMode,
    step: LossStep,
    inputs: Sequence[Tensor],
    paths: Sequence[str],
) -> TracedGraph:
    try:
        with (
            tracing_conditions(step.checkpointing),
            _gradients_only_returned(),
            _no_ranges(),
            own_seeds_refused(),
        ):
            try:
                return joint_graph(mode, step, inputs)
            except Exception:
                if not step.has_values:
                    raise
            # The code does more with the values of tensors than to store them.
            step.stores_values = step.has_values = False
            return joint_graph(mode, step, inputs)
    except OwnSeedError as error:
        raise UserError(f"{capitalised(source.place_of(error))} {error}.") from None
    except ZeroirError:
        raise
    except ImpureOperatorError as error:
        raise UntraceableError(
            f"{capitalised(source.place_of(error))} uses the operator {error.op}, which {error.breach}.",
            module_of_error(error, step.model),
        ) from None
    except UntracedCallError as error:
        raise UntraceableError(
            f"{capitalised(source.place_of(error))} cannot be traced: {error}.",
            module_of_error(error, step.model),
            is_of_gradients=isinstance(error, BackwardCallError),
        ) from None
    except DATA_DEPENDENT as error:
        raise _depends_on_values(error, source, step) from None
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
        refusal = collective_error(error)
        if refusal is not None:
            raise UserError(f"{capitalised(source.place_of(error))} {refusal}.") from None
        if is_on_another_device(error):
            raise UserError(
                f"{capitalised(source.place_of(error))} uses a tensor that is not a parameter or buffer of the model: "
                f"{MAKE_PART_OF_MODEL}."
            ) from None
        if changes_outside(error):
            raise UserError(
                f"{capitalised(source.place_of(error))} changes a tensor that is not the model's in place, such as the "
                "running statistics of another module's batch norm in training mode: pass the module as "
                'frozen={"critic": critic}, whose buffers change in the program, set it to eval(), or give its norms '
                "track_running_stats=False, so that they use the batch's statistics and keep none."
            ) from None
        if _OF_AN_EARLIER_CALL in str(error):
            raise UserError(
                f"{capitalised(source.place_of(error))}: the code uses a tensor that it made in an earlier call, while "
                "a program computes the same at every step: keep the tensor in a buffer (register_buffer), or make it "
                "between steps from outputs."
            ) from None
        if is_higher_order(error):
            raise UntraceableError(
                f"{capitalised(source.place_of(error))} uses a higher-order operator such as torch.cond or "
                "flex_attention, which zeroir cannot trace; express it with tensor operations such as torch.where.",
                module_of_error(error, step.model),
            ) from None
        if asks_for_data(error):
            raise _depends_on_values(error, source, step) from None
        sentence = source.explain(error, f"{capitalised(source.names.loss)} cannot be traced")
        if mode.shape_env is not None:
            # Libraries such as NumPy know no sizes that depend on dims.
            raise ShapesError(sentence, module=module_of_error(error, step.model)) from None
        raise UserError(sentence) from None


@contextmanager
def _gradients_only_returned() -> Iterator[None]:
    """Within the block, refuse code that calls backward() itself, as reversible layers do: a trace loses its sums."""
    plain, thread = torch.autograd.backward, threading.get_ident()

    def refused(*args: object, **kwargs: object) -> None:
        if threading.get_ident() != thread:  # code of an opaque module, which runs once
            plain(*args, **kwargs)  # type: ignore[arg-type]
            return
        raise BackwardCallError(
            "it calls backward(), and gradients that the code adds up itself are not part of a program; use "
            "torch.autograd.grad, or name the module whose forward does so: --opaque PATTERN"
        )

    with mock.patch.object(torch.autograd, "backward", refused):
        yield


@contextmanager
def _no_ranges() -> Iterator[None]:
    """Within the block, let the ranges of a profiler do nothing: their operators have no tensors."""
    with (
        mock.patch.object(record_function, "__enter__", _begun),
        mock.patch.object(record_function, "__exit__", return_value=None),
    ):
        yield


def _begun(range_: record_function) -> record_function:
    return range_


def _depends_on_values(
    error: BaseException, source: ModelSource, step: LossStep
) -> UntraceableError:
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    if line_of_error(error) is None and any(c.co_name == _BACKWARD for c in frames):
        # Torch does not say which forward it belongs to.
        return UntraceableError(
            f"{capitalised(source.place_of(error))}: the backward uses the values of a tensor to decide what shape to "
            f"make ({_operator(error)}), as that of x[mask] = y does where mask has booleans; express it with tensor "
            "operations such as torch.where, or name the module whose forward does so: --opaque PATTERN.",
            "",
        )
    return UntraceableError(
        f"{capitalised(source.place_of(error))} uses the values of a tensor to decide what to do or what shape to make "
        f"({_operator(error)}); a program is compiled once for all values, so express it with tensor operations such "
        "as torch.where.",
        module_of_error(error, step.model),
    )


def _operator(error: BaseException) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else type(error).__name__
