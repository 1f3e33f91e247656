"""The shipped examples: their data, their contract as model files, and the reference curve of the GPT."""

import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from examples import cnn, gpt
from tools import reference_curve
from zeroir.cli.app import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"
CURVE = json.loads((Path(__file__).parents[1] / "data" / "gpt_reference_curve.json").read_text())


def test_ranks_share_out_one_global_batch() -> None:
    start = 7
    streams = [gpt.batches(rank, 3, seed=1, start_step=start) for rank in range(3)]
    whole = [torch.cat([next(stream)[0] for stream in streams]) for _ in range(2)]
    again = [
        next(itertools.islice(gpt.batches(rank, 3, seed=1), start + 1, None))[0]
        for rank in range(3)
    ]
    assert torch.equal(whole[1], torch.cat(again))
    assert not torch.equal(whole[0], whole[1])


def test_batches_have_the_shape_of_the_example_and_predict_the_next_byte() -> None:
    tokens, targets = next(gpt.batches(0, 1, seed=0))
    for real, example in zip((tokens, targets), gpt.batch(), strict=True):
        assert (real.shape, real.dtype) == (example.shape, example.dtype)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_modules_initialise_themselves_one_by_one() -> None:
    module = gpt.GPT(gpt.WIDTH, gpt.HEADS, gpt.LAYERS)
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    module.apply(gpt.init)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert module.head.weight is module.tokens.weight


def test_the_reference_learns_more_than_byte_frequencies() -> None:
    assert CURVE["unigram_entropy"] == pytest.approx(gpt.unigram_entropy(), abs=1e-5)
    last = CURVE["losses"][-10:]
    assert sum(last) / len(last) < CURVE["unigram_entropy"] - 1


@pytest.mark.slow
def test_the_reference_curve_is_what_pytorch_computes() -> None:
    settings = CURVE["settings"]
    losses, _ = reference_curve.train(
        ranks=settings["ranks"], steps=8, seed=settings["seed"], learning_rate=settings["lr"]
    )
    assert losses == pytest.approx(CURVE["losses"][:8], rel=1e-3)


def test_the_images_of_the_cnn_depend_on_seed_and_position_alone() -> None:
    streams = [iter(cnn.batches(0, 2, seed=1)) for _ in range(2)]
    next(streams[0]), next(streams[1])
    (images, labels), (again, _) = (cast("cnn.Batch", next(stream)) for stream in streams)
    assert torch.equal(images, again)
    for real, example in zip((images, labels), cnn.batch(), strict=True):
        assert (real.shape, real.dtype) == (example.shape, example.dtype)
    assert set(labels.tolist()) == set(range(cnn.CLASSES))
    evaluated = [cast("cnn.Batch", next(iter(cnn.eval_batches(rank, 2, 0)))) for rank in range(2)]
    assert not torch.equal(evaluated[0][0], evaluated[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["cnn.py", "llama.py:model(layers=1)"])
def test_examples_equal_eager_pytorch(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world-size", "3", "--steps", "2"]
    assert run_command(["check", str(EXAMPLES / spec), *options]) == 0
    assert "equal 3 eager replicas bit for bit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
def test_peft_loads_the_adapters_that_an_engine_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import lora

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lora, "STEPS", 4)
    lora.main()
    first, last, trained, loaded = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out))
    assert last < first
    assert trained == pytest.approx(loaded, abs=1e-4)
    with torch.no_grad():
        untouched = lora.base()(**next(lora.batches(0, 1, seed=1))).loss.item()
    assert untouched != pytest.approx(loaded, abs=1e-3)
    saved = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert saved == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
