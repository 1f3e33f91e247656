"""Options: validated once, and the same again after they stood in a program as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.config import (
    CompileOptions,
    for_world_size,
    has_effect,
    make_options,
    options_of,
)
from zeroir.config.offload_places import KEPT_ON_DISK, OFFLOADED
from zeroir.errors import UserError
from zeroir.ir.limits import LARGEST_SCALAR
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Algorithm
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program

POSITIVE = st.floats(min_value=1e-300, max_value=LARGEST_SCALAR)
FRACTIONS = st.floats(min_value=0, max_value=math.nextafter(1, 0))
PATTERNS = st.text(st.sampled_from("abz019_.*?[]"), min_size=1)

OPTIONS = st.builds(
    lambda *parts: make_options({name: one for part in parts for name, one in part.items()}),
    st.fixed_dictionaries(
        {"world_size": st.integers(1, 1024)},
        optional={
            "micro_steps": st.integers(1, 64),
            "units": PATTERNS,
            "keep_fp32": st.lists(PATTERNS),
            "lr": POSITIVE,
            "weight_decay": FRACTIONS,
            "clip": POSITIVE,
            "elide": st.booleans(),
        },
    ),
    st.one_of(
        st.just({}),
        st.fixed_dictionaries(
            {"offload": st.sets(st.sampled_from(OFFLOADED), min_size=1).map(list)},
            optional={"offload_units": PATTERNS},
        ),
        st.fixed_dictionaries(
            {"offload": st.sets(st.sampled_from(KEPT_ON_DISK), min_size=1).map(list)},
            optional={"offload_to": st.sampled_from(["host", "disk"])},
        ),
        st.fixed_dictionaries(
            {
                "offload": st.just(["optimizer", "parameters", "activations"]),
                "offload_to": st.lists(
                    st.tuples(st.sampled_from(KEPT_ON_DISK), st.sampled_from(["host", "disk"])),
                    min_size=1,
                    unique_by=lambda pair: pair[0],
                ).map(dict),
            }
        ),
        st.fixed_dictionaries(
            {"page_optimizer": st.sampled_from(["2GiB", "1e9"])},
            optional={
                "page_bytes": st.integers(1, 512).map(lambda blocks: 4096 * blocks)
                | st.sampled_from(["512KiB", "1.5MiB", "2097152"])
            },
        ),
    ),
    st.one_of(
        st.just({"optimizer": "sgd"}),
        st.fixed_dictionaries(
            {"optimizer": st.sampled_from(["adam", "adamw"])},
            optional={
                "beta1": FRACTIONS,
                "eps": POSITIVE,
                "optimizer_bits": st.sampled_from([32, 8]),
            },
        ),
        st.fixed_dictionaries({"optimizer": st.just("momentum"), "momentum": FRACTIONS}),
    ),
    st.one_of(
        st.fixed_dictionaries(
            {"precision": st.just("fp16")},
            optional={"initial_loss_scale": st.floats(min_value=1, max_value=LARGEST_SCALAR)},
        ),
        st.fixed_dictionaries({"precision": st.sampled_from(["fp32", "bf16"])}),
    ),
    st.one_of(
        st.fixed_dictionaries({"stage": st.integers(0, 2)}),
        st.fixed_dictionaries({"stage": st.just(3)}, optional={"prefetch": st.integers(0, 8)}),
    ),
)


@given(options=OPTIONS)
def test_options_survive_a_program_and_its_text(options: CompileOptions) -> None:
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=1),)), options=options)
    assert options_of(program) is options
    assert options_of(parse(print_program(program))).flat == options.flat


IN_VAIN: list[tuple[dict[str, object], str]] = [
    (
        {"stage": 0, "live_gradients": 1},
        "--live-gradients 1 needs --stage 2 or 3, but the stage is 0",
    ),
    (
        {"stage": 1, "live_gradients": 4},
        "--live-gradients 4 needs --stage 2 or 3, but the stage is 1",
    ),
    ({"stage": 0, "prefetch": 2}, "--prefetch 2 needs --stage 3, but the stage is 0"),
    ({"stage": 2, "prefetch": 2}, "--prefetch 2 needs --stage 3, but the stage is 2"),
    ({"stage": 1, "prefetch_budget": "1GB"}, "--prefetch-budget 1GB needs --stage 3"),
    ({"stage": 2, "unshard": ["a", "b"]}, "--unshard a,b needs --stage 3, but the stage is 2"),
    ({"prefetch": 2, "prefetch_budget": "1GB"}, "--prefetch 2 and --prefetch-budget 1GB both set"),
    ({"prefetch": 0, "prefetch_budget": "1GB"}, "--prefetch 0 and --prefetch-budget 1GB both set"),
    ({"initial_loss_scale": 4}, "--initial-loss-scale 4.0 needs --precision fp16"),
    ({"precision": "bf16", "loss_scale_window": 4}, "--loss-scale-window 4 needs --precision fp16"),
    ({"loss_scale_hysteresis": 4}, "--loss-scale-hysteresis 4 needs --precision fp16"),
    ({"minimum_loss_scale": 4}, "--minimum-loss-scale 4.0 needs --precision fp16"),
    ({"loss_scale": 4}, "--loss-scale 4.0 needs --precision fp16"),
    ({"loss_scale_factor": 4}, "--loss-scale-factor 4.0 needs --precision fp16"),
    (
        {"loss_scale_consecutive_hysteresis": True},
        "--loss-scale-consecutive-hysteresis true needs --precision fp16",
    ),
    (
        {"precision": "fp16", "loss_scale": 4, "loss_scale_window": 7},
        "--loss-scale-window 7 is for a dynamic loss scale, but --loss-scale 4.0 fixes it",
    ),
    (
        {
            "precision": "fp16",
            "loss_scale_hysteresis": 1,
            "loss_scale_consecutive_hysteresis": True,
        },
        "--loss-scale-consecutive-hysteresis needs a --loss-scale-hysteresis above 1",
    ),
    (
        {"precision": "fp16", "initial_loss_scale": 0.5},
        "--minimum-loss-scale 1 would raise the loss scale, which begins with",
    ),
    (
        {"stage": 1, "micro_steps": 2, "accumulate_locally": True},
        "--accumulate-locally true needs --stage 2 or 3, but the stage is 1",
    ),
    ({"accumulate_locally": True}, "--accumulate-locally needs --micro-steps above 1"),
    (
        {"order": "layer"},
        "--order layer needs --micro-steps above 1, but a step has one micro-step",
    ),
    (
        {"micro_steps": 8, "order": "layer=3"},
        "--order layer=3 runs groups of 3 micro-batches, which do not divide the 8 of --micro-steps",
    ),
    (
        {"micro_steps": 8, "order": "layer=8", "accumulate_locally": True},
        "--order layer=8 adds up gradients on each rank by itself; leave --accumulate-locally out",
    ),
    (
        {"micro_steps": 2, "accumulate_locally": True, "live_gradients": 1},
        "--live-gradients 1 bounds the full gradients that wait for their reduction",
    ),
    ({"optimizer": "sgd", "beta1": 0.5}, "--beta1 0.5 needs --optimizer adam, adamw or lion"),
    ({"optimizer": "momentum", "beta2": 0.5}, "--beta2 0.5 needs --optimizer adam, adamw or lion"),
    (
        {"optimizer": "lion", "eps": 0.5},
        "--eps 0.5 needs --optimizer adam, adamw, muon, adafactor or shampoo",
    ),
    ({"nesterov": True}, "--nesterov true needs --optimizer momentum or muon"),
    (
        {"optimizer": "adafactor", "momentum": 0.5},
        "--momentum 0.5 needs --optimizer momentum or muon",
    ),
    ({"optimizer": "muon", "dampening": 0.5}, "--dampening 0.5 needs --optimizer momentum"),
    ({"ns_steps": 3}, "--ns-steps 3 needs --optimizer muon"),
    ({"d": 2.0}, "--d 2.0 needs --optimizer adafactor"),
    ({"offload_to": "disk"}, "--offload-to disk needs --offload, which says"),
    (
        {"offload": "gradients", "offload_to": "disk:/x"},
        "--offload-to disk:/x is for optimizer, parameters and activations, but --offload has gradien",
    ),
    (
        {"offload": "optimizer", "host_cache": "1GB"},
        "--host-cache 1GB needs --offload-to disk:FOLDER, whose cache it is",
    ),
    ({"offload_units": "a.*"}, "--offload-units a.* needs --offload, which says"),
    ({"offload_fraction": 0.5}, "--offload-fraction 0.5 needs --offload optimizer"),
    (
        {"offload": "parameters", "offload_fraction": 0.5},
        "--offload-fraction 0.5 needs --offload optimizer",
    ),
    (
        {"clip": 1.0, "speculate": True},
        "--speculate is for an update on the host: it needs --offload optimizer",
    ),
    (
        {"offload": "optimizer", "speculate": True},
        "--speculate needs --clip or --precision fp16: without them no decision holds the update back",
    ),
    (
        {"offload": "optimizer", "offload_to": "disk", "clip": 1.0, "speculate": True},
        "--speculate updates states in host memory, but --offload-to disk keeps them on a disk",
    ),
    (
        {"offload": "optimizer", "optimizer_bits": 8, "clip": 1.0, "speculate": True},
        "--speculate is for states of 32 bits, but --optimizer-bits is 8",
    ),
    ({"page_bytes": 4096}, "--page-bytes 4096 needs --page-optimizer"),
    (
        {"page_optimizer": "1MB"},
        "--page-optimizer 1MB is less than one page of --page-bytes 2MiB",
    ),
    (
        {"optimizer": "muon", "offload": "optimizer"},
        "--offload optimizer updates shards on the host, but muon works on whole parameters",
    ),
    (
        {"page_optimizer": "1GB", "offload": ("parameters", "optimizer")},
        "--page-optimizer 1GB updates on the device, and --offload optimizer on the host",
    ),
    (
        {"offload": "optimizer", "offload_to": "optimizer=disk:/a,parameters=host"},
        "has a place for parameters, but --offload has optimizer",
    ),
    (
        {"offload": "optimizer,gradients", "offload_to": "optimizer=disk:/a,gradients=disk:/a"},
        "names a disk for gradients, which the next op reads, so that host memory keeps them",
    ),
    (
        {"offload": "optimizer,parameters", "offload_to": "optimizer=disk:/a,parameters=disk:/b"},
        "names the folders /a and /b, but a rank has one file on disk; name one folder",
    ),
    (
        {"offload": "adaptive", "memory_budget": "1GB", "offload_to": "optimizer=disk:/a"},
        "--offload adaptive chooses what is moved, so that --offload-to is one place",
    ),
    ({"offload": "adaptive"}, "--offload adaptive needs --memory-budget"),
    (
        {"offload": "adaptive", "memory_budget": "1GB", "offload_units": "a"},
        "--offload adaptive chooses what --offload-units says",
    ),
    (
        {"offload": "adaptive", "memory_budget": "1GB", "page_optimizer": "1GB"},
        "--offload adaptive chooses what --page-optimizer says",
    ),
    (
        {"optimizer": "muon", "optimizer_bits": 8},
        "--optimizer-bits 8 is for states of single elements",
    ),
    ({"optimizer": "sgd", "optimizer_bits": 8}, "--optimizer-bits 8 has no effect: sgd keeps no"),
]


@pytest.mark.parametrize(("values", "words"), IN_VAIN)
def test_what_would_have_no_effect_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_options({"world_size": 2, **values})
    assert words in str(caught.value)
    assert str(caught.value).startswith("These options do not go together: ")


@pytest.mark.parametrize("stage", range(4))
def test_defaults_and_what_is_off_are_never_refused(stage: int) -> None:
    plain = make_options({"world_size": 2, "stage": stage})
    assert make_options(plain.flat) == plain
    off = {"prefetch": 0, "elide": False, "select_saved": False, "overlap_update": False}
    assert has_effect(make_options({"world_size": 2, "stage": stage, **off}))


def test_what_a_program_carries_is_read_though_it_has_no_effect() -> None:
    texts = {**make_options({"world_size": 2, "stage": 1}).texts, "prefetch": "3"}
    read = for_world_size(CompileOptions.from_pairs(tuple(texts.items())), 4)
    assert (read.stage, read.prefetch.units, read.world_size) == (1, 3, 4)
    assert not has_effect(read)


def test_the_text_reads_as_a_person_would_write_it() -> None:
    options = make_options({"world_size": 4, "precision": "fp16", "keep_fp32": ["norm*", "head"]})
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=4),)), options=options)
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
        assert make_options({"world_size": 1, "keep_fp32": given_}).precision.keep_fp32 == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stage": 7}, "--stage is 7"),
        ({"world_size": 0}, "--world-size is 0"),
        ({"precision": "int8"}, "'fp32', 'bf16' or 'fp16'"),
        ({"keep_fp32": 3}, "--keep-fp32 is 3"),
        ({"sparkle": 1}, "no option --sparkle"),
        ({"optimizer": "muon", "ns_coefficients": "1,2"}, "--ns-coefficients is 1,2"),
        ({"optimizer": "muon", "adjust_lr_fn": "other"}, "'original' or 'match_rms_adamw'"),
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
        ({"optimizer": "lion"}, (0.9, 0.99, 0.0)),
        ({"optimizer": "muon"}, (0.95, 1, 0.1, 1e-7, 5, 3.4445, -4.775, 2.0315, 0)),
        (
            {"optimizer": "muon", "ns_coefficients": "1,2,3", "adjust_lr_fn": "match_rms_adamw"},
            (0.95, 1, 0.1, 1e-7, 5, 1, 2, 3, 1),
        ),
        ({"optimizer": "adafactor"}, (-0.8, 2.0**-23, 1e-3, 1.0, 0.0)),
    ],
)
def test_defaults_are_torchs(values: dict[str, object], hyper: tuple[float, ...]) -> None:
    assert make_options({"world_size": 1, **values}).optimizer.hyper == hyper


@given(replicas=st.integers(1, 64), shards=st.integers(1, 64))
def test_a_mesh_says_how_many_ranks_there_are(replicas: int, shards: int) -> None:
    options = make_options({"mesh": f"shard = {shards}, replicate={replicas}"})
    assert options.mesh == f"replicate={replicas},shard={shards}"
    assert options.world_size == options.device_mesh.world_size == replicas * shards
    assert options.replicas == replicas
    program = Program(mesh=options.device_mesh, options=options)
    assert options_of(program) is options
    assert options_of(parse(print_program(program))).flat == options.flat
    assert make_options({"mesh": options.mesh, "world_size": replicas * shards}) == options


def test_another_number_of_ranks_makes_other_groups_of_one_size() -> None:
    options = make_options({"mesh": "replicate=2,shard=4", "stage": 2})
    assert for_world_size(options, 8) == options
    assert for_world_size(options, 12) == make_options({"mesh": "replicate=3,shard=4", "stage": 2})
    with pytest.raises(UserError) as caught:
        for_world_size(options, 6)
    for words in ("replicate=2,shard=4", "6 ranks leave a part of a group over", "another --mesh"):
        assert words in str(caught.value)
    plain = make_options({"world_size": 2})
    assert for_world_size(plain, 3) == make_options({"world_size": 3})
    assert plain.replicas is None


def test_the_default_world_size_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert make_options({}).world_size == 6
    assert make_options({"mesh": "replicate=2,shard=2"}).world_size == 4


def test_a_program_does_not_name_the_folder_of_its_disk() -> None:
    here = make_options({"world_size": 2, "offload": "parameters", "offload_to": "disk:/nvme"})
    there = make_options({"world_size": 2, "offload": "parameters", "offload_to": "disk"})
    assert here.pairs == there.pairs
    assert here == there
    assert (here.offload.folder, there.offload.folder) == ("/nvme", None)
    assert here.offload.is_to_disk
    assert CompileOptions.from_pairs(here.pairs).offload.is_to_disk


def test_each_kind_has_its_place() -> None:
    """Those that are not named go to host memory; a folder may have a comma in its name."""
    text = "parameters=host,optimizer=disk:/a,b"
    kinds = "optimizer,gradients,parameters,activations"
    options = make_options({"world_size": 2, "offload": kinds, "offload_to": text})
    assert options.offload.to == "optimizer=disk:/a,b,parameters=host"
    assert options.offload.folder == "/a,b"
    assert options.offload.kept_on_disk == ("optimizer",)
    pairs = {"parameters": "host", "optimizer": "disk:/a,b"}
    given = make_options({"world_size": 2, "offload": kinds, "offload_to": pairs})
    assert given.flat == options.flat
    stored = CompileOptions.from_pairs(options.pairs)
    assert stored.offload.to == "optimizer=disk,parameters=host"
    assert stored.offload.kept_on_disk == ("optimizer",)


@pytest.mark.parametrize(
    "places",
    [
        "weights=host",
        "optimizer=nvme",
        "optimizer=",
        "optimizer=host,parameters",
        "optimizer=host,weights=disk",
        "optimizer=host,optimizer=disk",
    ],
)
def test_wrong_places_of_kinds_are_refused(places: str) -> None:
    with pytest.raises(UserError) as caught:
        make_options({"offload": "optimizer", "offload_to": places})
    assert f"--offload-to is {places}, but should be host, disk or disk:FOLDER" in str(caught.value)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"order": "layer=1"}, "--order is layer=1, but should be step, layer, or layer=G for groups"),
    ({"offload": "optimiser"}, "--offload is optimiser, but should be some of optimizer,"),
    ({"offload": ["adaptive", "optimizer"]}, "--offload is adaptive,optimizer, but should be"),
    ({"offload": "optimizer,adaptive"}, "separated by commas, or adaptive alone."),
    (
        {"offload_to": "nvme"},
        "--offload-to is nvme, but should be host, disk or disk:FOLDER, or one of them for each",
    ),
    (
        {"offload_to": "disk:"},
        "--offload-to is disk:, but should be host, disk or disk:FOLDER, or one of them for each",
    ),
    (
        {"offload_to": "host:x"},
        "--offload-to is host:x, but should be host, disk or disk:FOLDER, or one of them for each",
    ),
    ({"offload_fraction": 1.5}, "--offload-fraction is 1.5, but should be less than or equal to 1"),
    ({"page_optimizer": "much"}, "--page-optimizer is much, but should be an amount of memory"),
    (
        {"page_bytes": 4097},
        "--page-bytes is 4097, but should be a multiple of 4096 bytes above 0, such as 512KiB.",
    ),
    ({"optimizer_bits": 16}, "--optimizer-bits is 16, but should be 32 or 8."),
    ({"optimizer_bits": [8]}, "--optimizer-bits is [8], but should be 32 or 8."),
    (
        {"group": "a:optimizer=shampoo,optimizer_bits=8"},
        "--group a:optimizer=shampoo,optimizer_bits=8: --optimizer-bits 8 is for states of single",
    ),
    (
        {"group": "a:optimizer_bits=4"},
        "a:optimizer_bits=4: optimizer_bits is 4, but should be 32 or 8.",
    ),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_a_wrong_value_is_named_with_what_it_should_be(
    values: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_options({"world_size": 2, **values})
    assert words in str(caught.value)


def test_groups_take_over_the_bits_of_states_that_can_have_them() -> None:
    options = make_options(
        {
            "world_size": 2,
            "optimizer_bits": 8,
            "group": "a:lr=1;b:optimizer=lion;c:optimizer=muon;d:optimizer_bits=32",
        }
    )
    assert [each.bits for each in options.every_optimizer[1:]] == [8, 8, 32, 32]
    assert CompileOptions.from_pairs(options.pairs).flat == options.flat


def test_what_is_offloaded_has_one_order() -> None:
    options = make_options({"world_size": 2, "offload": "activations,optimizer,activations"})
    assert options.offload.what == ("optimizer", "activations")
