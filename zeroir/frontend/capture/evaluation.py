"""The graph of an evaluation, and what a step or an evaluation stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from zeroir.errors import UserError
from zeroir.frontend.capture.captured_graph import CapturedGraph, GraphInput, InputKind
from zeroir.frontend.capture.captured_model import CapturedEvaluation
from zeroir.frontend.capture.loss_and_outputs import UnknownOutputError
from zeroir.frontend.capture.loss_step import LossStep
from zeroir.frontend.capture.read_graph import without_dead_nodes
from zeroir.frontend.capture.state_check import note_on_stores, stores_of_evaluation
from zeroir.frontend.watch.stored_tensors import StoredObject, StorePlace

GraphOfStep = tuple[CapturedGraph, tuple[str, ...]]
"""A joint graph, and the blocks that were reused in it."""


def evaluation_of(
    joint_of_step: CapturedGraph,
    step: LossStep,
    outputs: Sequence[str],
    capture_graph: Callable[[], GraphOfStep],
    *,
    has_stores: bool,
) -> tuple[CapturedEvaluation | None, str | None]:
    """Return the graph of an evaluation, or None and a sentence where the model cannot be captured under ``eval()``.

    Tensors that it stores are among its outputs where it ``has_stores``; otherwise the sentence names them.

    Raises:
        UserError: if an output that the user requests does not exist.
    """
    try:
        with step.evaluating(outputs):
            joint, reused_blocks = capture_graph()
            sites = step.sites
            stores = stores_of_evaluation(joint, step.model, step, lambda: capture_graph()[0])
            of_forward = stores if has_stores else ()
            (joint, reused_blocks), stored = with_stores(
                step, of_forward, capture_graph, (joint, reused_blocks)
            )
            lost = [store.name for store in stores if store not in step.stores]
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
    captured = CapturedEvaluation(
        joint=joint, sites=sites, reused_blocks=reused_blocks, stored=stored
    )
    return captured, note_on_stores(lost) if lost else None


def with_stores(
    step: LossStep,
    stores: Sequence[StorePlace],
    capture_graph: Callable[[], GraphOfStep],
    plain: GraphOfStep,
) -> tuple[GraphOfStep, tuple[StoredObject, ...]]:
    """Return the graph of a step whose outputs are what it stores at these places, too, and what that is.

    Where a program cannot have them the ``plain`` graph is returned, and the step has no ``stores``.
    """
    step.stores = tuple(stores)
    if not stores:
        return plain, ()
    try:
        return capture_graph(), step.stored
    except UserError:
        step.stores = ()
        return plain, ()


def _named_alike(joint: CapturedGraph, joint_of_step: CapturedGraph) -> Iterator[GraphInput]:
    """Yield the inputs of an evaluation, whose constants have the names of equal ones in the step, or new ones."""

    def key(item: GraphInput, graph: CapturedGraph) -> tuple[object, ...]:
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
