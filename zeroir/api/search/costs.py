"""The predicted time and memory of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import load_program
from zeroir.api.keywords import EstimateKeywords, flat_values
from zeroir.api.search.histogram import BATCHES, Histogram, counts_within, require_no_sizes
from zeroir.config.shapes import parse_values, values_given
from zeroir.cost.estimate import Estimate
from zeroir.cost.estimate import estimate as estimate_with
from zeroir.cost.estimate_batches import dims_of, estimate_batches
from zeroir.cost.estimate_options import EstimateOptions, make_estimate_options
from zeroir.cost.machine import Machine, load_machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.cost.simulate import Simulation, simulate_evaluation
from zeroir.cost.simulate import simulate as simulate_program
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.instances import values_within
from zeroir.memory.footprint import footprint


def simulate(
    program: CompiledProgram | str | Path,
    machine: Machine | str | Path = "dgx-h100",
    *,
    straggler: float | None = None,
    micro_steps: int | None = None,
    at: Mapping[str, int] | str | None = None,
) -> Simulation:
    """Simulate a training step of a program, or of the one in a ``.zir`` file, on a machine.

    ``machine`` is the name of a machine that zeroir describes, or a TOML file. With ``straggler``, rank 0's own work
    takes that many times as long. ``micro_steps`` replaces the number that the program was compiled for. ``at`` are the
    values of dims in all batches, such as ``{"length": 2048}``; other dims have their largest.

    Raises:
        UserError: if the program or the machine is missing or wrong, or they conflict.
    """
    compiled = program if isinstance(program, CompiledProgram) else load_program(program)
    values = values_given(compiled.program, at)
    loaded_machine = machine if isinstance(machine, Machine) else load_machine(machine)
    needed = footprint(with_measured_workspaces(compiled.program, loaded_machine))
    compiled = compiled.at(values)

    def simulated(*, is_redone: bool) -> Simulation:
        return simulate_program(
            compiled.program,
            loaded_machine,
            logical=compiled.logical,
            straggler=straggler,
            micro_steps=micro_steps,
            is_redone=is_redone,
        )

    speculates = any(isinstance(op, ops.CommitStep) for op in compiled.program.ops())
    return replace(
        simulated(is_redone=False),
        evaluation_s=simulate_evaluation(compiled.program, loaded_machine),
        redone_s=simulated(is_redone=True).step_s if speculates else None,
        at=values,
        peak_bytes=int(needed.total_bytes),
    )


def estimate(
    params: float,
    *,
    at: Mapping[str, int] | str | None = None,
    histogram: Histogram | None = None,
    **options: Unpack[EstimateKeywords],
) -> Estimate:
    """Estimate the memory and communication of training ``params`` parameters, at every stage.

    The other keywords are the fields of ``EstimateOptions``. ``seq`` and ``batch`` are the sizes of the largest batch;
    a step's batches have those of ``at``, such as ``{"seq": 512}``, or of a histogram, which is a CSV file with the
    columns ``seq``, ``batch`` and ``count``, or a sequence of such rows. Sizes that are not named are the largest.

    Raises:
        UserError: if an option is wrong, or a size is larger than the largest.
    """
    given = flat_values(cast("Mapping[str, object]", options), EstimateOptions)
    return estimate_with_options(make_estimate_options({"params": params, **given}), at, histogram)


def estimate_with_options(
    values: EstimateOptions,
    at: Mapping[str, int] | str | None = None,
    histogram: Histogram | None = None,
) -> Estimate:
    """Return the estimate of these options, and that of a step's batches where they are given.

    Raises:
        UserError: as ``estimate``.
    """
    if at is None and histogram is None:
        return estimate_with(values)
    require_no_sizes(histogram, at)
    dims = dims_of(values)
    if histogram is None:
        sizes = parse_values(at) if isinstance(at, str) else at or {}
        return estimate_batches(values, {tuple(values_within(dims, sizes).values()): 1})
    if histogram == BATCHES:
        raise UserError(
            "An estimate knows no model file whose batches could be measured: give a CSV file with the columns seq, "
            "batch and count."
        )
    return estimate_batches(values, counts_within(dims, histogram))
