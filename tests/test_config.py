"""Options: validated once, and the same again after they stood in a program as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.config import CompileOptions, make_options, options_from_pairs
from zeroir.errors import UserError
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program

POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
FRACTIONS = st.floats(min_value=0, max_value=math.nextafter(1, 0))
PATTERNS = st.text(st.sampled_from("abz019_.*?[]"), min_size=1)

OPTIONS = st.builds(
    lambda values, momentum: make_options({**values, **momentum}),
    st.fixed_dictionaries(
        {"world_size": st.integers(1, 1024)},
        optional={
            "stage": st.integers(0, 3),
            "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
            "micro_steps": st.integers(1, 64),
            "units": PATTERNS,
            "keep_fp32": st.lists(PATTERNS),
            "lr": POSITIVE,
            "beta1": FRACTIONS,
            "eps": POSITIVE,
            "weight_decay": FRACTIONS,
            "clip": POSITIVE,
            "prefetch": st.integers(0, 8),
            "elide": st.booleans(),
            "initial_loss_scale": POSITIVE,
        },
    ),
    st.one_of(
        st.fixed_dictionaries({"optimizer": st.sampled_from(["sgd", "adam", "adamw"])}),
        st.fixed_dictionaries({"optimizer": st.just("momentum"), "momentum": FRACTIONS}),
    ),
)


@given(options=OPTIONS)
def test_options_survive_a_program_and_its_text(options: CompileOptions) -> None:
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=1),)), options=options.to_pairs())
    assert options_from_pairs(parse(print_program(program)).options) == options


def test_the_text_reads_as_a_person_would_write_it() -> None:
    options = make_options({"world_size": 4, "precision": "fp16", "keep_fp32": ["norm*", "head"]})
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=4),)), options=options.to_pairs())
    first_line = print_program(program).partition("\n")[0]
    for words in (
        "stage=3",
        "precision=fp16",
        "optimizer=adamw",
        "keep_fp32=norm*,head",
        "lr=0.001",
    ):
        assert f" {words} " in f"{first_line} "
    assert '"' not in first_line
    assert "clip" not in first_line


def test_patterns_may_come_one_by_one_or_together() -> None:
    expected = ("norm*", "head", "tail")
    for given_ in ("norm*,head,tail", ["norm*", "head,tail"], expected):
        assert make_options({"world_size": 1, "keep_fp32": given_}).keep_fp32 == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stage": 7}, "--stage is 7"),
        ({"world_size": 0}, "--world-size is 0"),
        ({"precision": "int8"}, "'fp32', 'bf16' or 'fp16'"),
        ({"keep_fp32": 3}, "--keep-fp32 is 3"),
        ({"sparkle": 1}, "no option --sparkle"),
        ({"nesterov": True}, "need --optimizer momentum"),
        ({"optimizer": "momentum", "nesterov": True, "dampening": 0.5}, "no dampening"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_options({"world_size": 2, **values})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "hyper"),
    [
        ({}, (0.9, 0.999, 1e-8, 0.01)),
        ({"optimizer": "adam"}, (0.9, 0.999, 1e-8, 0.0)),
        ({"optimizer": "sgd", "weight_decay": 0.5}, (0.0, 0.0, 0.0, 0.5)),
        ({"optimizer": "momentum"}, (0.9, 0.0, 0.0, 0.0)),
        ({"optimizer": Algorithm.MOMENTUM, "momentum": 0.5, "nesterov": True}, (0.5, 0, 1, 0)),
    ],
)
def test_defaults_are_torchs(values: dict[str, object], hyper: tuple[float, ...]) -> None:
    assert make_options({"world_size": 1, **values}).hyper == hyper


@given(replicas=st.integers(1, 64), shards=st.integers(1, 64))
def test_a_mesh_says_how_many_ranks_there_are(replicas: int, shards: int) -> None:
    options = make_options({"mesh": f"shard = {shards}, replicate={replicas}"})
    assert options.mesh == f"replicate={replicas},shard={shards}"
    assert options.world_size == options.device_mesh.world_size == replicas * shards
    assert options.replicas == replicas
    program = Program(mesh=options.device_mesh, options=options.to_pairs())
    assert options_from_pairs(parse(print_program(program)).options) == options
    assert make_options({"mesh": options.mesh, "world_size": replicas * shards}) == options


def test_another_number_of_ranks_makes_other_groups_of_one_size() -> None:
    options = make_options({"mesh": "replicate=2,shard=4", "stage": 2})
    assert options.for_world_size(8) == options
    assert options.for_world_size(12) == make_options({"mesh": "replicate=3,shard=4", "stage": 2})
    with pytest.raises(UserError) as caught:
        options.for_world_size(6)
    for words in ("replicate=2,shard=4", "a multiple of 4 ranks and not 6", "another --mesh"):
        assert words in str(caught.value)
    plain = make_options({"world_size": 2})
    assert plain.for_world_size(3) == make_options({"world_size": 3})
    assert plain.replicas is None
