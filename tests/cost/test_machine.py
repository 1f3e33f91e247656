"""A machine is read from TOML, every figure has a source, and each mistake is one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cost.support import machine
from zeroir.cost.machine import (
    Machine,
    load_machine,
    machine_names,
    machine_of_device,
    parse_machine,
    to_toml,
)
from zeroir.errors import UserError
from zeroir.ir.dtypes import DType

SHIPPED = (
    *("1xh100-pcie", "8x4090-pcie", "cpu-local"),
    *("dgx-2", "dgx-a100-80g", "dgx-h100", "hgx-h200"),
)
TEXT = to_toml(load_machine("dgx-h100"))


def test_these_machines_are_described() -> None:
    assert machine_names() == SHIPPED
    for name in SHIPPED:
        assert load_machine(name).name == name


@pytest.mark.parametrize("name", SHIPPED)
def test_a_machine_is_read_as_it_was_written(name: str) -> None:
    described = load_machine(name)
    assert parse_machine(to_toml(described), "again") == described


def test_measured_figures_are_read_as_they_were_written() -> None:
    described = machine(
        segments={"ab12": {"seconds": 0.5, "source": 'a "profile" of \\ 1\u00b5s\n'}},
        collectives=[
            {
                "kind": kind,
                "ranks": 2,
                "nodes": 1,
                "alpha_s": 1e-5,
                "beta_s_per_byte": 1e-9,
                "source": "a profile",
            }
            for kind in ("all_gather", "reduce_scatter")
        ],
    )
    again = parse_machine(to_toml(described), "again")
    assert again == described
    assert again.segments["ab12"].seconds == 0.5
    assert [measured.kind for measured in again.collectives] == ["all_gather", "reduce_scatter"]


def test_a_figure_without_a_data_sheet_is_an_assumption() -> None:
    """No data sheet has achieved fractions of a peak, latencies or the times of the host."""
    for name in SHIPPED:
        for key, source in _sources(load_machine(name).model_dump()):
            if key.rpartition(".")[2] in ("fraction", "kernel_launch_s", "latency_s"):
                assert source.startswith("assumption"), (name, key, source)


def _sources(table: dict[str, object], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            if "source" in value:
                yield f"{path}.{key}", value["source"]
            else:
                yield from _sources(value, f"{path}.{key}")


def test_a_dtype_without_a_figure_computes_like_f32() -> None:
    compute = machine().compute
    assert compute.flops_per_s(DType.BF16) == compute.flops_per_s(DType.F32)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[memory]", "[memory", "is no TOML"),
        ('name = "dgx-h100"\n', "", "has no 'name'"),
        ("[disk]", "[disc]", "has an unknown key 'disc'"),
        (r"fraction = .*", 'fraction = { value = 1.5, source = "x" }', "'compute.fraction' is 1.5"),
        (r"fraction = .*", "fraction = 0.5", "'compute.fraction' is 0.5, but should be a table"),
        (r"fraction = .*", "fraction = { value = 0.5 }", "has no 'compute.fraction.source'"),
        (r"fraction = .*", 'fraction = { value = nan, source = "x" }', "'compute.fraction' is nan"),
        (r"f32 = .*\n", "", "a table with f32"),
        ("bf16 =", "bf15 =", "'compute.dense_flops_per_s.bf15'"),
        (r"_node = .*", '_node = { value = 2.5, source = "x" }', "a whole value of at least 1"),
        ("[host]\n", '[host]\nbytes_per_s = { value = 1.0, source = "x" }\n', "earlier version"),
        ("[host_link]\n", "[host_link]\nfraction = 1\n", "'host_link.fraction'"),
        (r"cores = .*", 'cores = { value = 0.5, source = "x" }', "a whole value of at least 1"),
        (r"latency_s = .*", 'latency_s = { value = -1, source = "x" }', "at least 0"),
        (r"latency_s = .*", 'latency_s = { value = "1", source = 1 }', "node_link.latency_s"),
        (r"latency_s = .*", 'latency_s = { value = "1", source = "x" }', "a valid number"),
        (r"latency_s = .*", 'latency_s = { value = true, source = "x" }', "a valid number"),
        (r"latency_s = .*", 'latency_s = { value = inf, source = "x" }', "a finite value"),
        (r"size_bytes = .*", 'size_bytes = { value = inf, source = "x" }', "a finite value"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(
    old: str, new: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(old if "[" not in old else re.escape(old), new, TEXT, count=1))
    with pytest.raises(UserError) as caught:
        load_machine(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert expected in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dgx-h10", "choose 1xh100-pcie, 8x4090-pcie"), ("gone.toml", "cannot be read: No such file")],
)
def test_a_machine_that_is_not_there_is_refused(name: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load_machine(name)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is no text"):
        load_machine(tmp_path / "x.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load_machine(tmp_path.with_suffix(".toml"))


def test_a_machine_may_be_a_single_node() -> None:
    assert load_machine("8x4090-pcie").network is None
    assert isinstance(machine(network=None), Machine)


def test_gpus_are_known_by_the_names_that_cuda_has_for_them() -> None:
    known = {device: name for name in machine_names() for device in load_machine(name).device_names}
    assert set(known.values()) == {*machine_names()} - {"cpu-local"}
    for device, name in known.items():
        machine = machine_of_device(device)
        assert machine is not None
        assert machine.name == name
    assert machine_of_device("NVIDIA T4") is None
