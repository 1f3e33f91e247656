"""Estimates against the ZeRO paper's figures (tests/data/zero_memory.json says which) and published formulas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest

from tests.support.covering import covering
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.cost.estimate import COMMUNICATED_PER_PARAMETER, Estimate, activation_bytes, estimate
from zeroir.cost.estimate_options import (
    EstimateOptions,
    Optimizer,
    make_estimate_options,
    optimizer_bytes_per_parameter,
    states_per_parameter,
)
from zeroir.errors import UserError
from zeroir.ir.analysis.traffic import collective_bytes, transfer_bytes
from zeroir.ir.buffers import Role, Space
from zeroir.memory.staging import staging_bytes
from zeroir.memory.states import MODEL_STATE_ROLES, model_state_bytes
from zeroir.passes.base import Pass
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.passes.offload.page_optimizer import PageOptimizer

PAPER = json.loads(
    (Path(__file__).parents[1] / "data" / "zero_memory.json").read_text(), parse_float=Decimal
)
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
GB = 10**9


def of(**options: object) -> Estimate:
    return estimate(make_estimate_options(options))


def gigabytes(params: float, world_size: int) -> list[float]:
    estimated = of(params=params, world_size=world_size, precision="fp16", optimizer="adam")
    return [stage.model_states_bytes / GB for stage in estimated.stages]


def require_printed(exact: float, printed: Decimal | int) -> None:
    """The paper rounds some figures and truncates others, so they differ by less than one unit of the last digit."""
    unit = Decimal(1).scaleb(int(Decimal(printed).as_tuple().exponent))
    assert abs(Decimal(exact) - printed) < unit, (exact, printed)


def test_the_headline_of_the_paper() -> None:
    headline = PAPER["headline"]
    estimated = gigabytes(float(headline["params"]), headline["world_size"])
    for stage, exact in enumerate(estimated):
        require_printed(exact, headline["gb"][f"stage{stage}"])


@pytest.mark.parametrize("row", PAPER["table_gb"], ids=lambda row: str(row["world_size"]))
def test_the_table_of_the_paper(row: dict[str, object]) -> None:
    assert PAPER["table_columns"] == ["stage1", "stage2", "stage3"]
    world_size = row["world_size"]
    assert isinstance(world_size, int)
    for name, params in SIZES.items():
        printed = row[name]
        assert isinstance(printed, list)
        for exact, figure in zip(gigabytes(params, world_size)[1:], printed, strict=True):
            require_printed(exact, figure)


@pytest.mark.parametrize("stage", range(4))
def test_the_formulas_of_the_paper(stage: int) -> None:
    formula = PAPER["formulas"][f"stage{stage}"]
    for count, ranks in ((1e6, 1), (1e9, 16)):
        exact = eval(formula, {}, {"P": count, "N": ranks, "K": 12})  # noqa: S307  arithmetic that the file states
        estimated = of(params=count, world_size=ranks).stages[stage]
        assert estimated.model_states_bytes == exact


def test_the_communication_of_the_paper() -> None:
    table = PAPER["communication_elements_per_step_in_units_of_P"]
    assert table.pop("note") == "times (N-1)/N on a ring"
    assert {f"stage{stage}": n for stage, n in COMMUNICATED_PER_PARAMETER.items()} == table
    for stage in of(params=1e9, world_size=4).stages:
        assert stage.sent_bytes == table[f"stage{stage.stage}"] * 2e9 * 3 / 4


def test_the_states_of_optimizers() -> None:
    table = dict(PAPER["optimizer_states_per_parameter"])
    assert table.pop("shampoo_adafactor").startswith("1 to 6")
    names: dict[str, Optimizer] = {
        "sgd": "sgd",
        "sgd_momentum": "momentum",
        "adam": "adam",
        "adamw": "adamw",
        "adam_fp32_master": "adam-fp32-master",
    }
    assert {key: states_per_parameter(name)[0] for key, name in names.items()} == table
    assert states_per_parameter("adafactor") == (0, 1)
    assert states_per_parameter("shampoo")[1] == 6
    for optimizer in get_args(Optimizer):
        low, high = states_per_parameter(optimizer)
        assert low <= high


@pytest.mark.parametrize(
    ("optimizer", "gathered"), [("muon", 2), ("adafactor", 8), ("shampoo", 12), ("lion", 0)]
)
def test_whole_parameters_are_gathered_from_stage_1_on(optimizer: Optimizer, gathered: int) -> None:
    plain = of(params=1e9, world_size=4, optimizer="adamw").stages
    for stage, other in zip(
        of(params=1e9, world_size=4, optimizer=optimizer).stages, plain, strict=True
    ):
        more = gathered * 1e9 * 3 / 4 if stage.stage else 0
        assert stage.sent_bytes == other.sent_bytes + more


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "sgd"}, 4),
        ({"optimizer": "lion"}, 8),
        ({"optimizer": "muon"}, 8),
        ({"optimizer": "sgd", "master": False}, 0),
        ({"optimizer": "momentum"}, 8),
        ({"optimizer": "adamw"}, 12),
        ({"optimizer": "adamw", "master": False}, 8),
        ({"optimizer": "adamw", "precision": "fp32"}, 8),
        ({"optimizer": "adam-fp32-master"}, 12),
        ({"optimizer": "adamw", "ema": True}, 16),
        ({"optimizer": "adam-fp32-master", "precision": "fp32"}, 12),
        ({"optimizer": "adafactor"}, 8),
        ({"optimizer": "shampoo"}, 28),
        ({"optimizer": "adamw", "optimizer_bits": 8}, 4 + 2 + 2 / 64),
        ({"optimizer": "lion", "optimizer_bits": 8, "ema": True}, 8 + 1 + 1 / 64),
        ({"optimizer": "adam", "optimizer_bits": 8, "precision": "fp32"}, 2 + 2 / 64),
    ],
)
def test_the_state_of_each_optimizer(options: dict[str, object], expected: float) -> None:
    estimated = make_estimate_options({"params": 1e9, **options})
    assert optimizer_bytes_per_parameter(estimated) == expected


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("optimizer", "bits"), [("sgd", 32), ("momentum", 32), ("adamw", 32), ("adamw", 8)]
)
def test_an_estimate_equals_a_program(
    stage: int, precision: str, optimizer: str, bits: int
) -> None:
    """In padded elements, without eliding a gather."""
    program = applied(
        mlp(blocks=2, dim=16, precision=precision, optimizer=optimizer, has_codes=bits == 8),
        for_stage(stage, 4, elide=False),
    )
    count = sum(flat.padded_numel for flat in program.flats)
    options = {"precision": precision, "optimizer": optimizer, "optimizer_bits": bits}
    estimated = of(params=count, world_size=4, **options).stages[stage]
    assert estimated.model_states_bytes == sum(model_state_bytes(program).values())
    traffic = collective_bytes(program)
    total = traffic["all_gather"] + traffic["reduce_scatter"] + 2 * traffic["all_reduce"]
    item = 4 if precision == "fp32" else 2
    # What is summed in FP32 travels in the gradient's dtype, so that elements are bytes over the item size.
    assert total == estimated.communicated_per_parameter * count * item


SEVEN_BILLION = {
    "params": 7e9,
    "precision": "fp16",
    "layers": 40,
    "hidden": 4096,
    "heads": 32,
    "seq": 2048,
}


@pytest.mark.parametrize("row", PAPER["rule_of_thumb_7b_fp16"]["rows"], ids=str)
def test_the_rule_of_thumb_is_an_estimate_without_master_weights_and_with_recomputation(
    row: dict[str, Decimal],
) -> None:
    """Its activations are a third less than the inputs of all layers, which it calls "about"."""
    options = {**SEVEN_BILLION, "batch": row["batch"], "master": False, "recompute": True}
    estimated = of(**options)
    stage = estimated.stages[0]
    assert stage.params_bytes + stage.optimizer_bytes == row["static"] * GB
    assert stage.gradients_bytes == row["gradient_peak"] * GB
    assert estimated.activations is not None
    layers_bytes = estimated.activations.layers_bytes
    assert layers_bytes == 2048 * 4096 * row["batch"] * 40 * 2
    assert row["activations"] * GB < layers_bytes < row["activations"] * GB * Decimal("1.4")
    parts = row["static"] + row["activations"] + row["gradient_peak"]
    require_printed(float(parts), row["total"])
    # With the master weights of mixed precision, and without recomputation, it is far from enough.
    exact = of(**SEVEN_BILLION, batch=row["batch"]).stages[0]
    assert exact.model_states_bytes == 112 * GB
    assert exact.total_bytes > row["total"] * GB


def test_activations_are_those_of_the_published_formula() -> None:
    """sbh (34 + 5 as/h) a layer, with s = 2048, b = 2, h = 4096, a = 32."""
    s, b, h, a, layers = 2048, 2, 4096, 32, 40
    base = {**SEVEN_BILLION, "batch": b}
    plain = activation_bytes(make_estimate_options(base))
    flash = activation_bytes(make_estimate_options({**base, "flash": True}))
    again = activation_bytes(make_estimate_options({**base, "recompute": True}))
    assert plain is not None
    assert flash is not None
    assert again is not None
    layer = s * b * h * 34 + 5 * a * s * s * b
    assert plain.total_bytes == layers * layer
    assert flash.total_bytes == layers * s * b * h * 34
    assert (again.layers_bytes, again.recomputed_bytes) == (layers * 2 * s * b * h, layer)
    logits = activation_bytes(make_estimate_options({**base, "vocab": 50_000}))
    assert logits is not None
    assert logits.outside_bytes == 5 * s * b * h + 4 * s * b * 50_000
    single = activation_bytes(make_estimate_options({**base, "precision": "fp32"}))
    assert single is not None
    assert single.total_bytes == layers * (s * b * h * 66 + 9 * a * s * s * b)


OFFLOADS = [
    combination
    for count in range(1, 4)
    for combination in combinations(("optimizer", "gradients", "parameters"), count)
]
BILLION = {"params": 1e9, "world_size": 4, "layers": 10}


@pytest.mark.parametrize("offload", OFFLOADS, ids=",".join)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_offloaded_bytes_leave_the_device_and_rest_elsewhere(
    offload: tuple[str, ...], place: str
) -> None:
    plain = of(**BILLION).stages
    offloaded = of(**BILLION, offload=offload, offload_to=place).stages
    for before, after in zip(plain, offloaded, strict=True):
        assert before.host_bytes == before.disk_bytes == 0
        assert set(asdict(before.moved).values()) == {0}
        left = float(before.model_states_bytes - after.model_states_bytes)
        gradients = 2e9 / (4 if before.stage else 1) if "gradients" in offload else 0
        # Stage 1 has whole gradients at rest, and a host a shard of them.
        left -= 2e9 - gradients if gradients and before.stage == 1 else 0
        on_host = left if place == "host" else gradients
        assert (after.host_bytes, after.disk_bytes) == (on_host, left - on_host)
        assert (after.moved.load > 0) == (after.moved.store > 0) == (after.disk_bytes > 0)


PASSES: Mapping[str, Pass] = {
    "optimizer": OffloadOptimizer(),
    "gradients": OffloadGradients(),
    "parameters": OffloadParameters(),
}
ONE_ON_DISK = ("optimizer=disk", "parameters=disk")
SCALAR_BYTES = 16
"""Bytes of the step's scalars that go down with the gradients."""


OFFLOADED = covering(
    (
        (offload, place, precision, stage)
        for offload in OFFLOADS
        for place in ("host", "disk", *ONE_ON_DISK)
        if place not in ONE_ON_DISK or place.partition("=")[0] in offload
        for precision in ("fp32", "bf16")
        for stage in range(4)
    ),
    lambda case: case,
)


@pytest.mark.parametrize(("offload", "place", "precision", "stage"), OFFLOADED)
def test_an_estimate_of_what_is_offloaded_equals_a_program(
    offload: tuple[str, ...], place: str, precision: str, stage: int
) -> None:
    """In padded elements; visits of whole parameters, which stages 0 to 2 have, leave the padding out."""
    kinds = tuple(
        kind for kind in offload if kind != "gradients" and place in ("disk", f"{kind}=disk")
    )
    program = mlp(blocks=2, dim=16, precision=precision, optimizer="adamw")
    passes = (*for_stage(stage, 4, elide=False), *(PASSES[kind] for kind in offload))
    to_disk = (OffloadToDisk(what=kinds),) if kinds else ()
    program = applied(program, (*passes, *to_disk))
    count = sum(flat.padded_numel for flat in program.flats)
    options = {"params": count, "world_size": 4, "precision": precision, "offload": offload}
    estimated = of(**options, offload_to=place).stages[stage]
    sizes: Counter[Space] = Counter()
    for buffer in program.buffers:
        is_state = buffer.space is not Space.DEVICE or buffer.role in MODEL_STATE_ROLES
        if buffer.is_persistent and is_state and buffer.role is not Role.SCALAR:
            sizes[buffer.space] += buffer.size_bytes
    assert estimated.host_bytes == sizes[Space.HOST]
    assert estimated.disk_bytes == sizes[Space.DISK]
    assert estimated.model_states_bytes == sizes[Space.DEVICE]
    traffic = transfer_bytes(program)
    assert 0 <= traffic["to_host"] - estimated.moved.to_host <= SCALAR_BYTES
    padding = count - program.parameters_numel
    item = 4 if precision == "fp32" else 2
    left_out = 2 * item * padding if "parameters" in offload and stage < 3 else 0
    unaligned = item * 64 * len(program.flats) if left_out else 0
    assert traffic["to_device"] == pytest.approx(
        estimated.moved.to_device - left_out, abs=unaligned
    )
    on_disk = left_out if "parameters" in kinds else 0
    assert traffic["load"] == pytest.approx(estimated.moved.load - on_disk, abs=unaligned)
    assert traffic["store"] == estimated.moved.store


def test_the_traffic_of_zero_offload_is_4_bytes_a_parameter() -> None:
    """Ren et al. 2021, section 3: gradients and parameters in 16 bits; no smaller traffic offloads as much."""
    for stage in of(**BILLION, offload="optimizer").stages:
        owned = 1e9 / (1 if stage.stage == 0 else 4)
        assert (stage.moved.to_host, stage.moved.to_device) == (2 * owned, 2 * owned)
    # The gradients go down anyway, so keeping them there adds nothing to it at stages 2 and 3.
    for stage in of(**BILLION, offload="optimizer,gradients").stages[2:]:
        assert (stage.moved.to_host, stage.moved.to_device) == (5e8, 5e8)


def test_offloaded_parameters_come_up_twice() -> None:
    """At stage 3 the shards; the host's update leaves them where they are, and the device's sends them down."""
    both = of(**BILLION, offload="optimizer,parameters").stages[3].moved
    assert (both.to_host, both.to_device) == (5e8, 2 * 5e8)
    alone = of(**BILLION, offload="parameters").stages[3].moved
    assert (alone.to_host, alone.to_device) == (5e8, 2 * 5e8)
    on_disk = of(**BILLION, offload="optimizer,parameters", offload_to="disk").stages[3].moved
    assert (on_disk.load, on_disk.store) == (12 * 2.5e8 + 2 * 5e8, 12 * 2.5e8 + 5e8)


def test_without_master_weights_the_host_updates_a_copy() -> None:
    single = of(**BILLION, precision="fp32", offload="optimizer").stages[3]
    assert single.host_bytes == (8 + 4) * 2.5e8
    assert single.params_bytes == 4 * 2.5e8


def test_a_fraction_of_the_optimizer_is_offloaded() -> None:
    whole = of(**BILLION, offload="optimizer").stages[3]
    half = of(**BILLION, offload="optimizer", offload_fraction=0.5).stages[3]
    assert half.host_bytes * 2 == whole.host_bytes
    assert half.optimizer_bytes == half.host_bytes
    assert half.moved.to_host * 2 == whole.moved.to_host


def test_offloaded_activations_are_copied_down_and_up() -> None:
    shape = {"layers": 10, "hidden": 128, "seq": 64, "flash": True, "batch": 2}
    plain = of(**{**BILLION, **shape})
    offloaded = of(**{**BILLION, **shape}, offload="activations")
    assert plain.activations is not None
    layers_bytes = plain.activations.layers_bytes
    for before, after in zip(plain.stages, offloaded.stages, strict=True):
        assert after.host_bytes == after.moved.to_host == after.moved.to_device == layers_bytes
        assert before.activations_bytes is not None
        # Two of ten layers are at work.
        assert after.activations_bytes == before.activations_bytes - layers_bytes * 8 // 10


@pytest.mark.parametrize(
    ("kind", "place"),
    [("optimizer", "host"), ("gradients", "host"), ("parameters", "host"), ("optimizer", "disk")],
)
def test_an_estimate_of_staging_is_close_to_that_of_a_program(kind: str, place: str) -> None:
    """The program's layers are all of its parameters, but for one percent."""
    program = mlp(blocks=8, dim=512, optimizer="adamw", clip=1.0)
    to_disk = (OffloadToDisk(what=(kind,)),) if place == "disk" else ()
    program = applied(program, (*for_stage(3, 4), PASSES[kind], *to_disk))
    count = sum(flat.padded_numel for flat in program.flats)
    options = {"params": count, "world_size": 4, "precision": "fp32", "layers": 8}
    estimated = of(**options, offload=kind, offload_to=place).stages[3]
    planned = staging_bytes(program)
    assert (Space.DEVICE in planned) == (kind != "optimizer")
    for space, size in (
        (Space.DEVICE, estimated.device_staging_bytes),
        (Space.HOST, estimated.host_staging_bytes),
    ):
        assert size == pytest.approx(planned.get(space, 0), rel=0.05, abs=8192)


@pytest.mark.parametrize("bits", [32, 8])
def test_an_estimate_of_pages_is_close_to_a_program(bits: int) -> None:
    """But for pages that are not full, and what rests on the device in whole blocks of 256 elements."""
    program = mlp(blocks=4, dim=128, optimizer="adamw", has_codes=bits == 8)
    device, page = (80_000, 16_384) if bits == 32 else (20_000, 4096)
    program = applied(
        program, (*for_stage(2, 2), PageOptimizer(device_bytes=device, page_bytes=page))
    )
    count = sum(flat.padded_numel for flat in program.flats)
    options = {"params": count, "world_size": 2, "precision": "fp32", "optimizer_bits": bits}
    pages = {"page_optimizer": str(device), "page_bytes": page}
    estimated = of(**options, **pages).stages[2]
    traffic = transfer_bytes(program)
    assert traffic["to_host"] == traffic["to_device"]
    assert estimated.moved.to_host == estimated.moved.to_device == estimated.host_bytes
    assert estimated.host_bytes == pytest.approx(traffic["to_host"], rel=0.03)
    assert estimated.device_staging_bytes == pytest.approx(
        staging_bytes(program)[Space.DEVICE], rel=0.2
    )
    # What is on the device of the states, slots among them, is what was given.
    states = of(**options).stages[2].optimizer_bytes
    assert estimated.optimizer_bytes == states - estimated.host_bytes
    assert estimated.optimizer_bytes + (estimated.device_staging_bytes or 0) == device
    assert of(**options, page_optimizer="1GB").stages == of(**options).stages


def test_states_of_8_bits_take_a_byte_and_a_share_of_their_scale() -> None:
    """At most 2.1 bytes a parameter for two moments, beside the master weight."""
    eight = EstimateOptions(params=1e9, optimizer_bits=8)
    assert 4 + 2 < optimizer_bytes_per_parameter(eight) <= 4 + 2.1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"offload": "adaptive"}, "knows no budget"),
        ({"offload": "weights"}, "optimizer, gradients, parameters, activations"),
        ({"offload": "activations"}, "needs --layers"),
        ({"optimizer_bits": 8, "optimizer": "muon"}, "not for muon"),
        ({"offload_to": "optimizer=disk"}, "a place for optimizer, but --offload has nothing"),
        ({"page_optimizer": "1GiB", "optimizer": "sgd"}, "sgd keeps no states"),
        ({"page_bytes": "1MiB"}, "--page-bytes 1MiB needs --page-optimizer"),
        ({"page_optimizer": "3MiB"}, "less than 2 pages of --page-bytes 2MiB"),
        ({"page_optimizer": "1GiB", "offload": "optimizer"}, "leave one of them out"),
    ],
)
def test_an_offload_that_cannot_be_estimated_is_refused(
    options: dict[str, object], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        of(params=1e9, **options)


def test_whole_units_add_to_the_shards() -> None:
    """Two of ten layers: 2 · 2e9 / 10 bytes of gradients from stage 2 on, and of parameters at stage 3."""
    estimated = of(params=1e9, world_size=4, layers=10).stages
    assert [stage.gradients_in_flight_bytes for stage in estimated] == [0, 0, 4e8, 4e8]
    assert [stage.gathered_bytes for stage in estimated] == [0, 0, 0, 4e8]
    assert estimated[3].total_bytes == estimated[3].model_states_bytes + 8e8
    assert of(params=1e9).stages[3].gathered_bytes is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hidden": 8, "seq": 8, "layers": 2}, "--heads"),
        ({"heads": 8}, "--layers, --hidden, --seq"),
        ({"vocab": 8}, "--layers, --hidden, --seq, --heads"),
        ({"hidden": 8, "flash": True}, "--layers, --seq"),
    ],
)
def test_half_a_shape_is_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=f"activations need {expected} as well"):
        of(params=1e9, **options)
