"""Which parameters are in which group, and what they train with."""

from __future__ import annotations

import pytest

from zeroir.config import CompileOptions, make_options
from zeroir.errors import UserError
from zeroir.frontend.lowering.parameter_groups import parameter_groups
from zeroir.ir.layout import Parameter

PARAMETERS = (
    Parameter(name="embed.weight", shape=(8, 4), aliases=("head.weight",)),
    Parameter(name="blocks.0.weight", shape=(4, 4)),
    Parameter(name="blocks.0.bias", shape=(4,)),
    Parameter(name="norm.weight", shape=(4,)),
    Parameter(name="scale", shape=()),
)


def names(options: CompileOptions) -> dict[str, tuple[str, ...]]:
    return {group.name: group.parameters for group in parameter_groups(PARAMETERS, options)}


def test_without_groups_all_are_in_one() -> None:
    assert names(make_options({"world_size": 1})) == {"default": tuple(p.name for p in PARAMETERS)}


def test_no_decay_is_for_less_than_two_dimensions() -> None:
    groups = parameter_groups(PARAMETERS, make_options({"world_size": 1, "no_decay": True}))
    assert {g.name: g.parameters for g in groups} == {
        "default": ("embed.weight", "blocks.0.weight"),
        "no_decay": ("blocks.0.bias", "norm.weight", "scale"),
    }
    assert [g.options.hyper for g in groups] == [(0.9, 0.999, 1e-8, 0.01), (0.9, 0.999, 1e-8, 0.0)]


def test_the_first_group_that_matches_counts() -> None:
    options = make_options({"world_size": 1, "group": ["*.bias:lr=0.1", "blocks.*:lr=0.2"]})
    assert names(options) == {
        "default": ("embed.weight", "norm.weight", "scale"),
        "bias": ("blocks.0.bias",),
        "blocks": ("blocks.0.weight",),
    }
    assert [g.options.lr for g in parameter_groups(PARAMETERS, options)] == [1e-3, 0.1, 0.2]


def test_a_group_that_sets_its_decay_keeps_it() -> None:
    options = make_options(
        {"world_size": 1, "no_decay": True, "group": ["blocks:weight_decay=0.5", "norm:lr=0.5"]}
    )
    groups = {g.name: g for g in parameter_groups(PARAMETERS, options)}
    assert {name: g.options.effective_weight_decay for name, g in groups.items()} == {
        "default": 0.01,
        "no_decay": 0.0,
        "blocks": 0.5,
        "norm.no_decay": 0.0,
    }
    assert groups["norm.no_decay"].options.lr == 0.5


@pytest.mark.parametrize("pattern", ["head.weight", "head", "embed.*|nothing", "[e]mbed"])
def test_patterns_are_of_every_name_of_a_parameter_and_of_its_modules(pattern: str) -> None:
    options = make_options({"world_size": 1, "group": f"{pattern}:lr=0.5,name=own"})
    assert names(options)["own"] == ("embed.weight",)


def test_names_are_made_from_patterns() -> None:
    texts = ["*norm*:lr=1", "*.weight:lr=1", "blocks.*:lr=1", "*:lr=1"]
    assert list(names(make_options({"world_size": 1, "group": texts}))) == [
        "norm",
        "weight",
        "blocks",
        "group",
    ]
    twice = make_options({"world_size": 1, "group": ["norm:lr=1", "*.norm|scale:lr=1"]})
    assert list(names(twice)) == ["default", "norm", "norm_2"]


@pytest.mark.parametrize(
    "group",
    [
        "*.bias:lr=0.5;blocks.*:weight_decay=0.0,beta1=0.8",
        ["*.bias:lr=0.5", "blocks.*:weight_decay=0.0,beta1=0.8"],
        {"*.bias": {"lr": 0.5}, "blocks.*": {"weight_decay": 0.0, "beta1": 0.8}},
    ],
)
def test_groups_are_a_text_a_list_or_a_mapping_and_are_stored(group: object) -> None:
    options = make_options({"world_size": 1, "group": group})
    assert options.group == ("*.bias:lr=0.5", "blocks.*:weight_decay=0.0,beta1=0.8")
    assert CompileOptions.from_pairs(options.pairs).flat == options.flat


def test_a_group_with_another_optimizer_has_its_defaults() -> None:
    options = make_options(
        {
            "world_size": 1,
            "optimizer": "momentum",
            "momentum": 0.8,
            "weight_decay": 0.3,
            "group": "norm:optimizer=adamw",
        }
    )
    (own,) = [g.options for g in parameter_groups(PARAMETERS, options) if g.name == "norm"]
    assert own.hyper == (0.9, 0.999, 1e-8, 0.3)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"group": "bias"}, "--group should be written like head.*:lr=1e-4,weight_decay=0"),
        ({"group": ":lr=1"}, "--group should be written like"),
        ({"group": "*:lr"}, "--group should be written like"),
        ({"group": "*:weight-decay=0"}, "did you mean weight_decay?"),
        ({"group": "*:stage=2"}, "sets stage, which is no setting of a group: optimizer, lr"),
        ({"group": "*:lr=1,lr=2"}, "sets lr twice"),
        ({"group": "*:lr=fast"}, "--group *:lr=fast: lr is fast, but should be"),
        (
            {"group": "*:lr=-1"},
            "--group *:lr=-1: lr is -1, but should be greater than or equal to 0.",
        ),
        ({"group": "*:lr=nan"}, "--group *:lr=nan: lr is nan, but should be"),
        ({"group": "*:momentum=0.5"}, "--group *:momentum=0.5: --momentum 0.5 needs"),
        ({"group": "*:optimizer=sgd,beta1=0.5"}, "needs --optimizer adam, adamw or lion"),
        ({"group": "*:optimizer=lbfgs"}, "optimizer is lbfgs, but should be"),
        ({"group": "*:lr=1,name=a b"}, "names are like head_2"),
        ({"group": "*:lr=1,name=default"}, "which is another group's"),
        ({"group": {"*": {"lr": None}}}, "sets lr to None, but values are numbers or texts"),
        ({"no_decay": True, "weight_decay": 0.0}, "--no-decay needs a --weight-decay above 0"),
        ({"no_decay": True, "optimizer": "sgd"}, "--no-decay needs a --weight-decay above 0"),
    ],
)
def test_what_is_no_group_is_refused_in_a_sentence(
    values: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_options({"world_size": 1, **values})
    assert sentence in str(caught.value)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ("nothing:lr=1", "matches no trained parameter or module with trained parameters"),
        ("blocks:lr=1;*.bias:lr=2", "has no parameters left: groups before it match all of them"),
        ("blocks:lr=1,name=no_decay", "Two groups have the name no_decay: give one of them"),
    ],
)
def test_a_group_without_parameters_is_refused(group: str, sentence: str) -> None:
    options = make_options({"world_size": 1, "group": group, "no_decay": True})
    with pytest.raises(UserError) as caught:
        parameter_groups(PARAMETERS, options)
    assert sentence in str(caught.value)
