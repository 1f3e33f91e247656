"""Models of Hugging Face and files of safetensors, by the command and by the function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeroir
from tests.convert.support import imported_tensors
from tests.support.zygote import import_path
from zeroir.checkpoint.reading import read_manifest
from zeroir.cli.app import run_command
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.errors import UserError


def tiny_llama(*, is_tied: bool, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no buffer 'model.rotary_emb.inv_freq'")
@pytest.mark.filterwarnings("ignore:.*has weights alone")
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_next_losses_are_those_of_transformers(is_tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(is_tied=is_tied, seed=0)
    model.save_pretrained(tmp_path / "llama", max_shard_size="8KB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    report = import_checkpoint(tmp_path / "llama", str(tmp_path / "checkpoint"))
    assert (report.format, report.step, report.states) == ("Hugging Face", 0, ())
    config = read_manifest(str(tmp_path / "checkpoint")).config
    assert isinstance(config, dict)
    assert config["tie_word_embeddings"] is is_tied
    tokens = torch.randint(0, 50, (2, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    other = tiny_llama(is_tied=is_tied, seed=1)
    compiled = zeroir.compile(
        other, batch=batch, optimizer=zeroir.optim.AdamW(lr=1e-2, weight_decay=0.0)
    )
    engine = compiled.engine()
    engine.load(tmp_path / "checkpoint")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses, expected = [], []
    for _ in range(5):
        losses.append(engine.step(batch).loss)
        loss: Tensor = model(**batch).loss
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        expected.append(loss.item())
    engine.close()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=3e-7, atol=0)


class Normed(nn.Module):
    """A model with buffers, which files of weights do not tell from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y.square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has weights alone")
def test_buffers_among_the_tensors_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Normed()
    for _ in range(3):
        module(torch.randn(5, 4))
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", str(tmp_path / "checkpoint"))
    engine = zeroir.compile(Normed(), batch=torch.randn(5, 4)).engine()
    engine.load(tmp_path / "checkpoint")
    state = engine.state_dict()
    engine.close()
    for name, expected in module.state_dict().items():
        assert torch.equal(state[name], expected), name


def test_the_command_renames_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"model.a.weight": torch.ones(2, 3), "model.b": torch.zeros(4), "head": torch.ones(1)}
    save_file(tensors, tmp_path / "weights.safetensors")
    checkpoint = tmp_path / "checkpoint"
    command = ["import", str(tmp_path / "weights.safetensors"), "-o", str(checkpoint)]
    assert run_command([*command, "--rename", "model.=", "--rename", "head=lm_head"]) == 0
    assert "3 parameters of 11 elements" in capsys.readouterr().out
    assert set(imported_tensors(checkpoint)) == {"a.weight.master", "b.master", "lm_head.master"}
    assert run_command([*command]) == 2
    assert "exists" in capsys.readouterr().err
    for rename, problem in (
        ("nothing=x", "No name begins with 'nothing'"),
        ("nothing", "should be OLD=NEW"),
        ("model.b=head", "two the name 'head'"),
    ):
        target = str(tmp_path / "other")
        assert run_command([*command[:-1], target, "--rename", rename, "--json"]) == 2
        assert problem in capsys.readouterr().err
        assert not Path(target).exists()


def test_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content, problem in (
        (None, "", "none of the folders that can be imported"),
        ("manifest.json", "{}", "is a checkpoint of zeroir already"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "../x"}}', "no file in its folder"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "a.safetensors"}}', "lacks a.safet"),
        ("model.safetensors.index.json", "{", "no JSON"),
        ("latest", "gone", "is not a folder beside it"),
    ):
        for path in folder.iterdir():
            path.unlink()
        if name is not None:
            (folder / name).write_text(content)
        with pytest.raises(UserError, match=problem):
            import_checkpoint(folder, str(tmp_path / "checkpoint"))


IMPORT = """
import sys
from pathlib import Path
from tests.support.resident import peak_resident_bytes
from zeroir.convert.import_checkpoint import import_checkpoint
before = peak_resident_bytes()
import_checkpoint(Path(sys.argv[1]), sys.argv[2])
assert "torch" not in sys.modules
print(peak_resident_bytes() - before)
"""


@pytest.mark.slow
def test_the_peak_of_memory_is_far_below_the_model(tmp_path: Path) -> None:
    """256 MB in one tensor of torch.save and one of safetensors, which take at most a few blocks of memory."""
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1 << 13, 1 << 13], "data_offsets": [0, 1 << 28]}}
    ).encode()
    with (tmp_path / "w.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 28))
    torch.save({"w": torch.zeros(1 << 13, 1 << 13)}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        command = [
            sys.executable,
            "-c",
            IMPORT,
            f"{tmp_path}/{name}",
            f"{tmp_path}/{name}.imported",
        ]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        assert int(subprocess.check_output(command, env=environment)) < 128 << 20
