"""The fastest way to train a model on a machine: a search for the options with the shortest simulated step that fits.

The model is captured once. Each choice of options is evaluated by lowering the logical program, measuring the memory of
a rank's device, and simulating the step. Only the chosen program is verified, including the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from zeroir.api.capture import capture_source, given_source, with_shapes_text
from zeroir.api.compiled import CompiledProgram, with_source
from zeroir.api.compiling import compile_again, lowered_for
from zeroir.api.config_file import Config, ResolvedOptions, resolve_options
from zeroir.api.keywords import CompileKeywords, flat_values, is_torchs
from zeroir.api.search.candidates import Candidate, CandidateMeasurer
from zeroir.api.search.histogram import Histogram, counts_of, mean_sizes
from zeroir.api.search.largest_batches import LargestBatches, largest_batches
from zeroir.api.search.planner import MOST_TRIED, Alternative, NothingFitsError, Planner
from zeroir.config import CompileOptions, make_options, options_of
from zeroir.config.offload_places import ADAPTIVE
from zeroir.config.shapes import values_given
from zeroir.cost.histogram import MeanStep, Shape, mean_step
from zeroir.cost.machine import Machine, load_machine
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.program import Program

if TYPE_CHECKING:
    from zeroir.frontend.source.module_source import FrozenModules
    from zeroir.frontend.source.source import LossFunction, Model, ModelSource, WeightFunction
    from zeroir.torch_ops.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen program, compiled and verified, and the choices that lost.

    ``alternatives`` are the best of every other stage and mesh, and what differs from the chosen one in one option,
    fastest first, then what does not fit. No choice among all ``choices`` can take less than ``bound_ns``.
    ``is_finished`` is False if the search ended because it had tried enough. Steps are those of batches in which dims
    have the values ``at``, and ``mean`` is the mean step of the chosen program for the batches of a histogram, if there
    is one. ``largest_batches`` are those that fit, if they were searched; the program is for the first.
    """

    compiled: CompiledProgram
    machine: str
    world_size: int
    budget_bytes: int
    chosen: Candidate
    alternatives: tuple[Alternative, ...]
    tried: int
    choices: int
    bound_ns: int
    is_finished: bool
    at: Mapping[str, int]
    mean: MeanStep | None = None
    largest_batches: LargestBatches | None = None


def plan(
    model: Model,
    machine: Machine | str | Path = "dgx-h100",
    *,
    batch: Batch = None,
    loss: LossFunction | None = None,
    weight: WeightFunction | None = None,
    frozen: FrozenModules | None = None,
    memory: str | None = None,
    at: Mapping[str, int] | str | None = None,
    histogram: Histogram | None = None,
    largest_batch: bool = False,
    most_tried: int = MOST_TRIED,
    config: Config | None = None,
    **options: Unpack[CompileKeywords],
) -> Plan:
    """Find the options of ``zeroir.compile`` with the shortest step of a model on a machine, within its memory.

    ``model``, ``batch``, ``loss``, ``weight``, ``frozen``, ``config`` and the keywords are those of ``zeroir.compile``.
    ``memory`` is the memory of a rank's device, such as ``80GB``; the default is that of the machine. Given options are
    kept, and the search chooses the others that affect speed and memory. If sizes depend on dims, the largest batches
    fit, and steps are those of batches in which dims have the values ``at``, such as ``{"length": 2048}``; others have
    their largest. With a ``histogram``, as ``zeroir.simulate_histogram`` takes it, steps are those of batches of its
    mean sizes, and the plan has the mean step, too. With ``largest_batch``, the dims are narrowed to the largest
    batches that fit, and the plan is for these.

    Raises:
        UserError: if the model, the machine or an option is wrong, or if nothing fits.
    """
    source = cache(lambda: given_source(model, batch, loss, weight, frozen))
    options = with_shapes_text(options, source)
    optimizer = options.get("optimizer")
    if is_torchs(optimizer):
        from zeroir.api.torch_optimizers import translated

        others = flat_values({name: each for name, each in options.items() if name != "optimizer"})
        given = dict(translated(optimizer, model, others).options)
    else:
        given = flat_values(options)
    resolved = resolve_options(config, given, source, giver="argument")
    return plan_with(
        source,
        machine,
        resolved,
        memory=memory,
        at=at,
        histogram=histogram,
        largest_batch=largest_batch,
        most_tried=most_tried,
    )


def plan_with(
    make_source: Callable[[], ModelSource],
    machine: Machine | str | Path,
    resolved: ResolvedOptions,
    *,
    memory: str | None = None,
    at: Mapping[str, int] | str | None = None,
    histogram: Histogram | None = None,
    largest_batch: bool = False,
    most_tried: int = MOST_TRIED,
) -> Plan:
    """Plan as ``plan`` does, with validated options, of which those that were set are kept.

    ``make_source`` is called once the other arguments have been validated, because loading a model takes time.
    """
    if histogram is not None and (at is not None or largest_batch):
        raise UserError(
            "A histogram says which sizes batches have, so it cannot be combined with --at and --largest-batch."
        )
    options = _without_adaptive(resolved.options)
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    amount = memory or options.offload.memory_budget
    budget_bytes = int(machine.memory.size_bytes.value) if amount is None else parse_bytes(amount)
    source = make_source()
    captured = capture_source(source, options)
    artifact = replace(captured.artifact, config=resolved.record)
    counts: Mapping[Shape, int] = {}
    if histogram is not None:
        counts = counts_of(artifact.logical, histogram, source, source.names.model)
        at = mean_sizes(artifact.logical, counts)
    values_given(artifact.logical, at)
    found: LargestBatches | None = None
    if largest_batch:
        found = _largest_batches(artifact.logical, options, machine, budget_bytes, most_tried)
        logical = found.narrowed(artifact.logical)
        options = make_options({**options.given, "shapes": options_of(logical).shapes})
        artifact = replace(artifact, logical=logical)
    values = values_given(artifact.logical, at)
    planner = Planner(artifact.logical, options, machine, budget_bytes, values)
    result = planner.search(most_tried)
    compiled = lowered_for(artifact, planner.measurer.options(result.chosen.settings), machine)
    return Plan(
        compiled=with_source(compiled, source, captured.traced, partial(compile_again, source)),
        machine=machine.name,
        world_size=options.world_size,
        budget_bytes=budget_bytes,
        chosen=result.chosen,
        alternatives=result.alternatives,
        tried=result.tried,
        choices=sum(region.size for region in planner.regions),
        bound_ns=result.bound_ns,
        is_finished=result.is_finished,
        at=values,
        mean=mean_step(compiled.program, machine, counts) if counts else None,
        largest_batches=found,
    )


def _largest_batches(
    logical: Program, options: CompileOptions, machine: Machine, budget_bytes: int, most_tried: int
) -> LargestBatches:
    """Return the largest batches that fit, with the options of the plan for all sizes, or if none fits the closest."""
    try:
        settings = (
            Planner(logical, options, machine, budget_bytes).search(most_tried).chosen.settings
        )
    except NothingFitsError as error:
        settings = error.closest.settings

    def needed_bytes(program: Program) -> int | None:
        candidate, outcome = CandidateMeasurer(program, options, budget_bytes, machine).measure(
            settings
        )
        return int(candidate.needed_bytes) if outcome.fits else None

    return largest_batches(logical, needed_bytes, budget_bytes)


def _without_adaptive(options: CompileOptions) -> CompileOptions:
    """Remove ``--offload adaptive`` from options, since the search itself decides about offloading."""
    if ADAPTIVE not in options.offload.what:
        return options
    given = options.given
    return make_options({name: value for name, value in given.items() if name != "offload"})
