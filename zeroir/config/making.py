"""Options from values by flat name: of the command line, of keywords, of files and of programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from zeroir.config.options import CompileOptions
from zeroir.config.rules import problem_of_groups, problem_without_effect
from zeroir.config.table import explain_validation, flat_model
from zeroir.errors import UserError
from zeroir.ir.mesh import REPLICATE_AXIS, SHARD_AXIS

GivenOptions: Final = flat_model(
    "GivenOptions", CompileOptions.rows(), "The options of ``zeroir compile``, by flat name."
)


def make_options(values: Mapping[str, object]) -> CompileOptions:
    """Validate options.

    Raises:
        UserError: on the first that is wrong, with its value and the expected values, or that has no effect.
    """
    options = CompileOptions.from_flat(values)
    if (problem := problem_of_groups(options)) is not None:
        raise UserError(f"{problem}.")
    if (problem := problem_without_effect(options)) is not None:
        raise UserError(f"These options do not go together: {problem}.")
    return options


def make_given_options(values: Mapping[str, object]) -> dict[str, object]:
    """Validate each option by itself; UserError as for ``make_options``."""
    try:
        return GivenOptions.model_validate(dict(values)).given
    except ValidationError as error:
        raise UserError(explain_validation(error, CompileOptions)) from None


def has_effect(options: CompileOptions) -> bool:
    """Return whether each option has an effect beside the others."""
    return problem_of_groups(options) is None and problem_without_effect(options) is None


def changed(options: CompileOptions, **values: object) -> CompileOptions:
    """Return the options with some of them replaced, by flat name; UserError as for ``make_options``."""
    return make_options({**options.flat, **values}) if values else options


def replaced(options: CompileOptions, **values: object) -> CompileOptions:
    """Replace options as ``changed`` does; an option may then have no effect."""
    return CompileOptions.from_flat({**options.flat, **values})


def for_world_size(options: CompileOptions, world_size: int) -> CompileOptions:
    """Return the options for another number of ranks. The groups of a mesh keep their size, and their number changes.

    Raises:
        UserError: if the number of ranks is no multiple of the size of a group.
    """
    mesh = None
    if options.mesh is not None:
        shard = options.device_mesh.size(SHARD_AXIS)
        if world_size % shard:
            raise UserError(
                f"The mesh {options.mesh} has groups of {shard} ranks, so {world_size} ranks leave a part of a group "
                f"over: start a multiple of {shard} ranks, or compile with another --mesh."
            )
        mesh = f"{REPLICATE_AXIS}={world_size // shard},{SHARD_AXIS}={shard}"
    return replaced(options, world_size=world_size, mesh=mesh)
