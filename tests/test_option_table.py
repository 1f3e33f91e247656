"""The table of options: what follows from the declaration of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from cyclopts import App, Parameter
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from zeroir.api.search.profile_options import ProfileOptions
from zeroir.cli.option_groups import (
    RUN_ROWS,
    ProfileParameters,
    RunParameters,
    parameters_of,
)
from zeroir.config import CompileOptions, make_options
from zeroir.config.table import FlatOptions, Option, OptionObject, arguments_of
from zeroir.errors import InternalError, UserError


class Warmth(OptionObject):
    """Options of something new."""

    degrees: Annotated[
        int, Field(ge=0, le=9), Option(name="warmth", group="Warmth", help="How warm it is.")
    ] = 1
    is_dry: Annotated[bool, Option(group="Warmth", help="Whether it is dry.")] = False


class Extended(OptionObject):
    """A compilation with an option more."""

    command: ClassVar[str | None] = "compile"
    stage: Annotated[int, Option(group="Sharding", help="ZeRO stage.")] = 3
    warmth: Warmth = Warmth()


ExtendedParameters = parameters_of("new", Extended.rows().values())


def read_by(kind: type[FlatOptions], arguments: list[str]) -> dict[str, object]:
    """The options that a command with these parameters reads."""
    app = App()

    def command(options: FlatOptions | None = None) -> dict[str, object]:
        return {} if options is None else options.given

    command.__annotations__["options"] = Annotated[kind | None, Parameter(name="*")]
    app.default(command)
    read: dict[str, object] = app(arguments, result_action="return_value")
    return read


def test_a_declared_option_is_on_the_command_line_and_in_every_form() -> None:
    given_options = read_by(ExtendedParameters, ["--warmth", "4", "--is-dry"])
    assert given_options == {"warmth": 4, "is_dry": True}
    made = Extended.from_flat(given_options)
    assert made.warmth == Warmth(degrees=4, is_dry=True)
    assert made.given == given_options
    assert made.flat == {"stage": 3, "warmth": 4, "is_dry": True}
    assert made.flag("warmth") == "--warmth 4"
    assert made.asks_for("is_dry")
    assert not made.asks_for("stage")
    assert arguments_of(made.given, Extended.rows()) == ["--warmth", "4", "--is-dry"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"warmth": 10}, "--warmth is 10, but should be less than or equal to 9."),
        ({"warmt": 1}, "There is no option --warmt; did you mean --warmth?"),
        ({"stage": "three"}, "--stage is three, but should be"),
    ],
)
def test_a_wrong_value_is_said_by_its_flag(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        Extended.from_flat(values)
    assert str(caught.value).startswith(sentence)


def test_an_object_says_which_argument_it_lacks() -> None:
    with pytest.raises(
        UserError, match=r"^zeroir\.Warmth has no argument degree; did you mean deg"
    ):
        Warmth.model_validate({"degree": 3})


def test_an_option_is_declared_once() -> None:
    class Twice(OptionObject):
        one: Warmth = Warmth()
        other: Warmth = Warmth()

    with pytest.raises(InternalError, match="two options are called warmth"):
        Twice.rows()


def test_every_least_stage_is_obeyed() -> None:
    """An option that needs a stage is refused below it, whichever it is."""
    given_values: dict[str, object] = {
        "accumulate_locally": True,
        "bucket_gathers": 1,
        "live_gradients": 3,
        "prefetch": 2,
        "prefetch_bytes": 1,
        "prefetch_budget": "1GB",
        "unshard": "*",
        "unshard_bytes": 1,
    }
    staged = {
        n: r.option.least_stage for n, r in CompileOptions.rows().items() if r.option.least_stage
    }
    assert staged.keys() == given_values.keys()
    for name, least in staged.items():
        values = {"world_size": 2, "micro_steps": 2, name: given_values[name]}
        assert make_options({**values, "stage": least}).asks_for(name)
        with pytest.raises(UserError, match=f"needs --stage {least}"):
            make_options({**values, "stage": least - 1})


_RUN_VALUES = {
    "steps": st.integers(1, 9),
    "seed": st.integers(0, 9),
    "check_finite": st.booleans(),
    "self_check": st.booleans(),
    "as_json": st.just(True),
    "save": st.just("folder with blanks"),
    "keep": st.integers(1, 4),
    "micro_steps": st.integers(1, 4),
    "order": st.sampled_from(["step", "layer", "layer=2"]),
    "offload": st.sampled_from([("optimizer",), ("optimizer", "parameters")]),
    "offload_to": st.sampled_from(["host", "disk:/a,b"]),
    "optimizer_bits": st.sampled_from([8, 32]),
}


@given(st.fixed_dictionaries({}, optional=_RUN_VALUES))
def test_ranks_read_the_options_that_the_launcher_was_given(values: dict[str, object]) -> None:
    values = {
        name: value for name, value in values.items() if value is not False or name == "self_check"
    }
    assert read_by(RunParameters, arguments_of(values, RUN_ROWS)) == values


_PROFILE_VALUES = {
    "machine": st.just("dgx-2"),
    "disk": st.just(Path("folder with blanks")),
    "rounds": st.integers(1, 9),
    "seed": st.integers(0, 9),
    "model": st.just("there.py"),
    "allow_model_change": st.just(True),
    "kernels": st.sampled_from(["eager", "inductor"]),
    "as_json": st.just(True),
}


@given(st.fixed_dictionaries({}, optional=_PROFILE_VALUES))
def test_ranks_of_a_profile_read_its_options(values: dict[str, object]) -> None:
    assert _PROFILE_VALUES.keys() == ProfileOptions.rows().keys()
    assert read_by(ProfileParameters, arguments_of(values, ProfileOptions.rows())) == values


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "stage": st.integers(0, 3),
            "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
            "clip": st.floats(0.1, 9),
            "optimizer": st.sampled_from(["sgd", "adamw", "muon"]),
            "lr": st.floats(0, 1),
            "keep_fp32": st.lists(st.sampled_from(["norm", "head*"]), max_size=2).map(tuple),
            "select_saved": st.booleans(),
        },
    )
)
def test_options_in_a_program_are_the_options(values: dict[str, object]) -> None:
    options = make_options({"world_size": 2, **values})
    assert CompileOptions.from_pairs(options.pairs).flat == options.flat
    assert make_options(options.flat) == options
    assert CompileOptions.from_flat(options.given) == options
