"""``zeroir export`` of checkpoints as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.cli.conftest import Zeroir, assert_refused
from tests.support.stored_modules import write_checkpoint


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a checkpoint of step 7."""
    write_checkpoint(tmp_path / "runs" / "step-00000007", nn.Linear(3, 2), step=7)
    return tmp_path / "runs"


def test_a_folder_of_checkpoints_becomes_a_hugging_face_folder(
    zeroir: Zeroir, runs: Path, tmp_path: Path
) -> None:
    answer = zeroir("export", runs, "-o", tmp_path / "out")
    assert answer.exit_code == 0
    assert answer.out == f"Wrote {tmp_path}/out from step 7, {runs}/step-00000007.\n"
    assert "config.json" in answer.err
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"weight", "bias"}


def test_json_tells_what_was_written(zeroir: Zeroir, runs: Path, tmp_path: Path) -> None:
    answer = zeroir(
        "export", runs / "step-00000007", "--format", "state-dict", "--dtype", "bf16",
        "-o", tmp_path / "weights.pt", "--json",
    )  # fmt: skip
    assert answer.json == {
        "format": "state-dict",
        "paths": [str(tmp_path / "weights.pt")],
        "checkpoint": str(runs / "step-00000007"),
        "step": 7,
        "notes": [],
    }
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights["weight"].dtype == torch.bfloat16


def test_shards_have_the_given_size(zeroir: Zeroir, runs: Path, tmp_path: Path) -> None:
    answer = zeroir("export", runs, "-o", tmp_path / "out", "--max-shard-size", "24")
    assert answer.exit_code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "'nowhere' is no checkpoint: name a folder that zeroir saved to"),
        (["RUNS", "--format", "chrome"], "RUNS"),
        (
            ["RUNS", "--format", "dcp", "--max-shard-size", "1GB"],
            "--max-shard-size can be combined",
        ),
        (["RUNS", "--max-shard-size", "big"], "'big' is no amount of memory"),
        (["RUNS", "--section", "update"], "--section can be combined only with --format graphviz"),
        (["RUNS", "--machine", "dgx-h100"], "--machine can be combined only with --format chrome"),
        (["RUNS", "--ema"], "it was saved without an average"),
        (["RUNS", "--format", "deepspeed"], "without an optimizer"),
        (["RUNS", "--format", "chrome", "--ema"], "--ema can be combined only with the formats of"),
        (["RUNS", "--format", "graphviz", "--dtype", "f32"], "--dtype can be combined only with"),
        (["PROGRAM"], "--format is missing: a compiled program is exported as chrome"),
        (["PROGRAM", "--format", "hf"], "is no checkpoint"),
        (["RUNS", "--format", "gguf"], "Invalid value"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    zeroir: Zeroir,
    runs: Path,
    programs: dict[int, Path],
    tmp_path: Path,
) -> None:
    paths = {"RUNS": str(runs), "PROGRAM": str(programs[3])}
    assert_refused(
        zeroir("export", *[paths.get(word, word) for word in arguments], "-o", tmp_path / "o"),
        paths.get(sentence, sentence),
    )
    assert not (tmp_path / "o").exists()
