"""The options of commands as parameters of the command line, in the groups in which ``--help`` lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter
from pydantic import create_model

from zeroir.api.running.run_options import LOWERING_ROWS, RunOptions
from zeroir.api.running.shared_options import KernelsName
from zeroir.api.search.profile_options import ProfileOptions
from zeroir.config.options import CompileOptions
from zeroir.config.table import FlatOptions, OptionRow
from zeroir.cost.estimate_options import ESTIMATE_ROWS

__all__ = [
    "AllowModelChange",
    "EstimateParameters",
    "Kernels",
    "MovedModel",
    "Options",
    "PlanParameters",
    "ProfileParameters",
    "RunParameters",
    "group",
    "parameters_of",
]

_AS_COMPILED: Final = "as compiled"
_CHOSEN: Final = "chosen"


_GROUPS: Final[dict[tuple[str, str], Group]] = {}


def group(command: str, title: str) -> Group:
    """Return a group in the help of a command; they are listed in the order in which they are first asked for."""
    return _GROUPS.setdefault((command, title), Group.create_ordered(title))


def parameters_of(command: str, rows: Iterable[OptionRow]) -> type[FlatOptions]:
    """Return a class of options with a parameter of the command line for each."""
    has_defaults_off = command in ("run", "profile")
    fields: dict[str, Any] = {}
    for row in rows:
        kind, field = row.flat_field
        default = None
        if command == "run" and row.name in LOWERING_ROWS:
            default = _AS_COMPILED
        elif command == "plan" and row.option.searched is not None:
            default = _CHOSEN
        parameter = Parameter(
            name=row.option.flag,
            # A switch of a job that is off by default has no opposite.
            negative=() if has_defaults_off and row.default is False else None,
        )
        if row.option.group and command != "profile":
            parameter = Parameter.combine(
                parameter, Parameter(group=group(command, row.option.group))
            )
        if default is not None:
            field.description = f"{row.option.help.partition(' [default:')[0]} [default: {default}]"
            parameter = Parameter.combine(parameter, Parameter(show_default=False))
        field.metadata = [*field.metadata, parameter]
        fields[row.name] = (kind, field)
    return create_model(f"{command.title()}Parameters", __base__=FlatOptions, **fields)


RUN_ROWS: Final[Mapping[str, OptionRow]] = {**RunOptions.rows(), **LOWERING_ROWS}
"""The options of ``zeroir run``: its own, and those by which it lowers a program again."""

if TYPE_CHECKING:
    Options = FlatOptions
    PlanParameters = FlatOptions
    RunParameters = FlatOptions
    ProfileParameters = FlatOptions
    EstimateParameters = FlatOptions
else:
    Options = parameters_of("compile", CompileOptions.rows().values())
    PlanParameters = parameters_of("plan", CompileOptions.rows().values())
    RunParameters = parameters_of("run", RUN_ROWS.values())
    ProfileParameters = parameters_of("profile", ProfileOptions.rows().values())
    EstimateParameters = parameters_of("estimate", ESTIMATE_ROWS.values())


def _as_in_run(name: str) -> Parameter:
    """Return an option of a run as an argument of another command."""
    row = RUN_ROWS[name]
    return Parameter(help=row.option.help, negative=() if row.default is False else None)


MovedModel = Annotated[str | None, _as_in_run("model")]
AllowModelChange = Annotated[bool, _as_in_run("allow_model_change")]
Kernels = Annotated[KernelsName, _as_in_run("kernels")]
