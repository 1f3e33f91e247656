"""The stages of a trace: capture, units, runs, segments, program."""

from __future__ import annotations

import warnings

from zeroir.config import CompileOptions
from zeroir.errors import ModelWarning, UserError
from zeroir.frontend.capture import Captured, capture
from zeroir.frontend.entry import ModelFile
from zeroir.frontend.lower import lower as lower_calls
from zeroir.frontend.partition import Run, partition
from zeroir.frontend.regions import recomputed_units, without_units
from zeroir.frontend.segments import cut
from zeroir.frontend.units import ROOT, ROOT_PRE, Units, find_units
from zeroir.ir.program import Program


def trace_model(model_file: ModelFile, options: CompileOptions) -> Program:
    """See ``zeroir.frontend.trace``."""
    captured = capture(model_file, options.precision, options.keep_fp32)
    units = find_units(captured.module, options.units)
    notes = [*captured.notes]
    if captured.checkpoints and not options.recompute:
        options = options.model_copy(
            update={"recompute": recomputed_units(captured.checkpoints, units)}
        )
        lost = without_units(captured.checkpoints, units)
        notes += [] if lost is None else [lost]
    for note in notes:
        warnings.warn(note, ModelWarning, stacklevel=2)
    return program_of(captured, options)


def program_of(captured: Captured, options: CompileOptions) -> Program:
    """The logical program of a captured model."""
    units = find_units(captured.module, options.units)
    canonical = {
        name: info.name for info in captured.parameters for name in (info.name, *info.aliases)
    }
    runs = partition(captured.joint, units, canonical)
    if options.units is not None and units.labels and all(r.unit not in units.labels for r in runs):
        raise UserError(
            f"--units {options.units} names only modules that the model never calls, such as lists; name what they "
            "contain."
        )
    calls = cut(captured.joint, runs, canonical)
    owners = {info.name: _owner(info.name, units, runs) for info in captured.parameters}
    return lower_calls(captured, calls, owners, options)


def _owner(parameter: str, units: Units, runs: list[Run]) -> str:
    """The unit of a parameter that nothing uses: its module's, else the root's first."""
    root = next((run.unit for run in runs if run.unit.startswith(ROOT)), ROOT_PRE)
    return units.home(parameter) or root
