"""``zeroir checkpoint``: its listings, its findings, and differences that torch computes, too."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.cli.conftest import Zeroir, assert_refused
from tests.support.checkpoint_files import signed_manifest
from tests.support.stored_modules import adamw_group, write_checkpoint
from zeroir.checkpoint.reading import read_manifest
from zeroir.convert import compare


class Small(nn.Module):
    """Parameters of two dtypes, tied ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 40)
        self.tied = nn.Linear(16, 40)
        self.tied.weight = self.embedding.weight
        self.rounded = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)


def moments(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {
        "exp_avg": {
            name: torch.randn_like(parameter) for name, parameter in module.named_parameters()
        }
    }


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def folder(module: nn.Module, tmp_path: Path) -> Path:
    """Two checkpoints of the same state but for the step, cut differently."""
    states = moments(module)
    root = tmp_path / "ckpts"
    root.mkdir()
    for step, ranks, flats in ((1, 3, 2), (2, 2, 3)):
        path = root / f"step-{step:08}"
        groups = [adamw_group(module, lr=0.1)]
        write_checkpoint(
            path,
            module,
            states=states,
            step=step,
            rank_count=ranks,
            flat_count=flats,
            groups=groups,
        )
    return root


@pytest.mark.parametrize("arguments", [("ls",), ("show", "--tensors"), ("verify",), ("diff",)])
def test_texts_of_files_neither_command_the_terminal_nor_are_markup(
    zeroir: Zeroir, folder: Path, arguments: tuple[str, ...]
) -> None:
    command, *options = arguments
    hostile = "[/x] \x1b[31mRED\x1b]0;title\x07\x9b1m\u202e"
    for path in sorted(folder.iterdir())[: 1 if command == "diff" else 2]:
        document = json.loads((path / "manifest.json").read_bytes())["manifest"]
        document["origin"]["saved_at"] = hostile
        document["metrics"] = {hostile: 1.0}
        document["flats"][-1]["parameters"][-1]["name"] = hostile
        document["groups"] = []
        (path / "manifest.json").write_bytes(signed_manifest(document))
    damaged = folder / "step-00000002" / "rank-00001.safetensors"
    if command == "verify":
        damaged.write_bytes(damaged.read_bytes()[:-1])
    given = sorted(folder.iterdir()) if command in ("show", "diff") else [folder]
    answer = zeroir("checkpoint", command, *given[: 1 if command == "show" else 2], *options)
    assert answer.exit_code == (1 if command == "verify" else 0)
    printed = answer.out + answer.err
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*printed}
    if command != "verify":
        assert r"[/x] \x1b[31mRED\x1b]0;title" in printed


def test_ls_names_checkpoints_newest_first_and_damaged_ones(zeroir: Zeroir, folder: Path) -> None:
    lines = zeroir("checkpoint", "ls", folder).out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["step-00000002", "2"],
        ["step-00000001", "1"],
    ]
    file = folder / "step-00000002" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    shutil.copytree(folder / "step-00000001", folder / "step-00000003")
    (folder / "step-00000003" / "manifest.json").write_text("{}")
    answer = zeroir("checkpoint", "ls", folder)
    assert answer.exit_code == 0
    assert answer.out.count("damaged\n") == 2
    assert f"'{file}' has {file.stat().st_size} bytes instead of" in answer.out
    assert f"'{folder}/step-00000003/manifest.json' is damaged" in answer.out
    listed = zeroir("checkpoint", "ls", folder, "--json").json["checkpoints"]
    assert [each["problem"] is None for each in listed] == [False, False, True]
    assert listed[2]["step"] == 1
    assert_refused(
        zeroir("checkpoint", "ls", folder / "step-00000001"),
        "is one checkpoint: see `zeroir checkpoint show`",
    )


def test_show_tells_what_is_in_it(zeroir: Zeroir, folder: Path, module: nn.Module) -> None:
    path = folder / "step-00000001"
    shown = zeroir("checkpoint", "show", path).out
    numel = sum(parameter.numel() for parameter in module.parameters())
    assert f"7 tensors of {numel:,} elements" in shown
    assert "rank-00002.safetensors" in shown
    assert "tied.weight" not in shown
    everything = zeroir("checkpoint", "show", path, "--tensors").out
    assert "embedding.weight = tied.weight" in everything
    assert "lr of group default" in everything
    assert zeroir("checkpoint", "show", path, "--json").json["step"] == 1


def test_show_takes_the_newest_of_a_folder(zeroir: Zeroir, folder: Path) -> None:
    newest = zeroir("checkpoint", "ls", str(folder), "--json").json["checkpoints"][0]
    assert zeroir("checkpoint", "show", str(folder), "--json").json["path"] == newest["path"]


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_where_nothing_is_one_sentence_says_so(
    zeroir: Zeroir, tmp_path: Path, command: str
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        answer = zeroir("checkpoint", command, path)
        assert (answer.exit_code, answer.out) == (2, "")
        assert answer.err.startswith(f"Error: '{path}' ")
        assert answer.err.count("\n") == 1


def test_verify_names_the_file_and_tensor_of_every_damage(zeroir: Zeroir, folder: Path) -> None:
    assert zeroir("checkpoint", "verify", folder).exit_code == 0
    path = folder / "step-00000001"
    manifest = read_manifest(str(path))
    expected: list[tuple[str, str | None]] = []
    for file in manifest.files[:2]:
        data = bytearray((path / file.name).read_bytes())
        data[-1] ^= 4
        (path / file.name).write_bytes(data)
        expected.append((file.name, file.tensors[-1].name))
    (path / manifest.files[2].name).unlink()
    expected.append((manifest.files[2].name, None))
    answer = zeroir("checkpoint", "verify", path)
    assert answer.exit_code == 1
    assert len(answer.out.splitlines()) == 3
    for name, tensor in expected:
        assert f"{path}/{name}' " in answer.out
        assert tensor is None or f"Tensor {tensor} of " in answer.out
    (outcome,) = zeroir("checkpoint", "verify", path, "--json").json["checkpoints"]
    assert [(each["file"], each["tensor"]) for each in outcome["damages"]] == expected
    assert "step-00000002 is whole" in zeroir("checkpoint", "verify", folder).out


def test_verify_finds_missing_damaged_and_foreign_files(zeroir: Zeroir, folder: Path) -> None:
    path = folder / "step-00000001"
    (path / "notes.txt").write_text("mine")
    answer = zeroir("checkpoint", "verify", path)
    assert answer.exit_code == 0
    assert "notes.txt is no part of the checkpoint" in answer.out
    shutil.copy(folder / "step-00000002" / "rank-00000.safetensors", path)
    answer = zeroir("checkpoint", "verify", path)
    assert answer.exit_code == 1
    assert "rank-00000.safetensors" in answer.out
    for damage in (lambda file: file.write_text("{}"), lambda file: file.unlink()):
        damage_manifest: Callable[[Path], object] = damage
        damage_manifest(path / "manifest.json")
        for named in (path, folder):
            answer = zeroir("checkpoint", "verify", named)
            assert answer.exit_code == 1
            assert "manifest.json" in answer.out


def test_an_empty_checkpoint_among_others_is_damaged(zeroir: Zeroir, folder: Path) -> None:
    (folder / "step-00000009").mkdir()
    answer = zeroir("checkpoint", "verify", folder)
    assert answer.exit_code == 1
    assert f"'{folder}/step-00000009' is not a checkpoint" in answer.out
    assert answer.out.count("is whole") == 2


def test_equal_states_have_no_difference_whatever_their_layout(
    zeroir: Zeroir, folder: Path
) -> None:
    first, second = folder / "step-00000001", folder / "step-00000002"
    same = zeroir("checkpoint", "diff", first, first, "--exit-code")
    assert (same.exit_code, "equal states" in same.out) == (0, True)
    answer = zeroir("checkpoint", "diff", first, second, "--json")
    assert answer.exit_code == 0
    assert not any(tensor["changed_numel"] for tensor in answer.json["tensors"])
    assert len(answer.json["tensors"]) == 7 + 7 + 3
    assert [fact["name"] for fact in answer.json["facts"]] == ["training steps", "step"]
    assert zeroir("checkpoint", "diff", first, second, "--exit-code").exit_code == 1


def test_differences_are_those_that_torch_computes(
    zeroir: Zeroir, module: nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "SLICE_NUMEL", 100)
    changed = Small()
    changed.load_state_dict(module.state_dict())
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.5))
        dict(changed.named_buffers())["norm.running_var"].mul_(3)
    path = folder / "step-00000005"
    write_checkpoint(path, changed, rank_count=5, flat_count=1, step=1)
    answer = zeroir("checkpoint", "diff", folder / "step-00000001", path, "--json").json
    rows = {(row["name"], row["quantity"]): row for row in answer["tensors"]}
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    others = {**dict(changed.named_parameters()), **dict(changed.named_buffers())}
    assert {name for name, _ in rows} == set(values)
    for (name, _), row in rows.items():
        before, after = values[name].detach().double(), others[name].detach().double()
        assert row["norm"] == pytest.approx(float((after - before).norm()))
        assert row["first_norm"] == pytest.approx(float(before.norm()))
        assert row["largest"] == pytest.approx(float((after - before).abs().max()))
        assert row["changed_numel"] == int((before != after).sum())
    assert {row["quantity"] for row in answer["only_in_first"]} == {"exp_avg"}
    assert answer["only_in_second"] == []


def test_not_a_number_and_other_dtypes(zeroir: Zeroir, tmp_path: Path) -> None:
    def saved(name: str, weight: Tensor) -> Path:
        module = nn.Module()
        module.weight = nn.Parameter(weight)
        write_checkpoint(tmp_path / name, module, flat_count=1)
        return tmp_path / name

    nan, inf = math.nan, math.inf
    plain = saved("plain", torch.tensor([1.0, nan, inf, 4.0]))
    same = saved("same", torch.tensor([1.0, nan, inf, 4.0], dtype=torch.bfloat16))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    few, many = saved("few", codes), saved("many", codes.float())
    (row,) = zeroir("checkpoint", "diff", few, many, "--json").json["tensors"]
    assert row["changed_numel"] == 0
    worse = saved("worse", torch.tensor([1.0, nan, inf, nan]))
    (row,) = zeroir("checkpoint", "diff", plain, same, "--json").json["tensors"]
    assert (row["changed_numel"], row["norm"], row["relative"]) == (0, 0, 0)
    printed = zeroir("checkpoint", "diff", plain, worse, "--json").out
    (row,) = json.loads(printed, parse_constant=pytest.fail)["tensors"]
    assert (row["changed_numel"], row["norm"], row["largest"]) == (1, "nan", "nan")
    shaped = saved("shaped", torch.zeros(2, 2))
    answer = zeroir("checkpoint", "diff", plain, shaped).out
    assert "different shapes or layouts: 1 tensor: master of weight." in answer
