"""Configuration files: reading them, what wins, and what an artefact keeps of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch

import zeroir
from zeroir import artifact
from zeroir.api.config_file import ResolvedOptions, resolve_options
from zeroir.api.search.plan import plan
from zeroir.config import CompileOptions, GivenOptions, make_given_options, make_options
from zeroir.errors import UserError
from zeroir.frontend.source.entry import load_model_file
from zeroir.frontend.source.source import ModelSource
from zeroir.ir.buffers import Role, Space

DATA = Path(__file__).parents[1] / "data"
MODEL = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, mask, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def model():
    return Net()


def batch():
    return {"mask": torch.tensor(1), "x": torch.ones(2, 8)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(MODEL)
    return str(path)


def no_source() -> ModelSource:
    raise AssertionError("the model is not needed")


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def resolved(path: Path, given: Mapping[str, object]) -> ResolvedOptions:
    return resolve_options(path, given, no_source, giver="command line")


# ------------------------------------------------------------------------------------------------------------- TOML


def test_a_toml_file_has_the_options_of_the_command_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "options.toml",
        'stage = 2\nworld-size = 4\nlr = 1e-2\nkeep_fp32 = ["norm", "head"]\nelide = true\n'
        'schedule = "cosine{warmup=10}"\nnesterov = true\noptimizer = "momentum"\n',
    )
    result = resolved(path, {"lr": 0.5, "stage": 1})
    assert result.options == make_options(
        {
            "stage": 1,
            "world_size": 4,
            "lr": 0.5,
            "keep_fp32": "norm,head",
            "schedule": "cosine{warmup=10}",
            "optimizer": "momentum",
            "nesterov": True,
        }
    )
    assert result.record is not None
    origins = dict(result.record.origins)
    assert (origins["lr"], origins["stage"]) == ("command line", "command line")
    assert (origins["world_size"], origins["schedule"]) == (str(path), str(path))
    assert list(origins) == [name for name in CompileOptions.rows() if name in origins]


def test_options_go_together_across_file_and_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.toml", 'nesterov = true\nprecision = "fp16"\n')
    options = resolved(path, {"world_size": 1, "optimizer": "momentum", "loss_scale_window": 5})
    assert (options.options.flat["nesterov"], options.options.loss_scale.window) == (True, 5)
    with pytest.raises(UserError, match=r"do not go together: .*nesterov"):
        resolved(path, {"world_size": 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage = 9\n", "--stage is 9, but should be less than or equal to 3."),
        ("stge = 3\n", "There is no option --stge; did you mean --stage? `zeroir compile --help`"),
        ("stage = \n", "the file is no TOML: Invalid value"),
        ("world_size = 2\nworld-size = 2\n", "world_size is given twice."),
        ("lr = " + "9" * 5_000 + "\n", "the file has a number of too many digits."),
        ("a = " + "[" * 100_000, "the values of the file nest too deep."),
        ("[model]\nname = 1\n", "There is no option --model;"),
        ('schedule = "cosin"\n', "--schedule is cosin, but should be a schedule such as"),
    ],
)
def test_a_wrong_toml_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, "a.toml", text)
    with pytest.raises(UserError) as caught:
        resolved(path, {"world_size": 1})
    assert str(caught.value).startswith(f"{path}: {words}")


# ------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"steps_per_print": 1,}', "the file is no JSON: "),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "the key gradient_clipping is given"),
        ("[1]", "the file should hold a JSON object."),
        ("[" * 100_000, "the values of the file nest too deep."),
        ('{"gradient_clipping": ' + "9" * 5_000 + "}", "the file has a number of too many digits."),
        ('{"gradient_clipping": NaN}', "gradient_clipping is nan, but should be a finite number."),
        ('{"gradient_clipping": 1e999}', "gradient_clipping is inf, but should be"),
        ('{"zero_optimization": {"stge": 1}}', "DeepSpeed has no key zero_optimization.stge; did"),
        ('{"train_micro_batch_size_per_gpu": 3}', "a micro-batch has 3 samples, but batch() in"),
        (
            '{"train_batch_size": 7}',
            "train_batch_size is 7, which is no multiple of gradient_accumulation_steps × ranks = 2",
        ),
    ],
)
def test_a_wrong_json_file_is_one_sentence(
    tmp_path: Path, model: str, text: str, words: str
) -> None:
    path = written(tmp_path, "ds.json", text)
    with pytest.raises(UserError) as caught:
        zeroir.compile(model, config=path, world_size=2)
    assert str(caught.value).startswith(f"{path}: {words}")


def test_a_file_that_is_missing_or_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.toml: the file cannot be read: No such file"):
        resolved(tmp_path / "a.toml", {})
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"b\.toml: the file is no text in UTF-8"):
        resolved(tmp_path / "b.toml", {})


def test_a_configuration_that_is_neither_file_nor_dict_is_one_sentence(model: str) -> None:
    with pytest.raises(UserError, match="config= is list, but should be the path of a file or"):
        zeroir.compile(model, config=cast("dict[str, object]", ["ds.json"]))


def test_a_batch_without_samples_is_one_sentence(tmp_path: Path) -> None:
    text = MODEL.replace('"x": torch.ones(2, 8)', '"x": torch.tensor(1.0)')
    path = written(tmp_path, "net.py", text)
    with pytest.raises(UserError, match="has no tensor with a dimension for samples"):
        zeroir.compile(path, config={}, world_size=1)


# ---------------------------------------------------------------------------------------------------------- programs


@pytest.mark.slow
def test_the_reference_file_works_as_it_is(model: str) -> None:
    compiled = zeroir.compile(model, config=DATA / "ds_config.json", world_size=1)
    options = compiled.options
    assert (options.stage, options.micro_steps.count, options.precision.dtype) == (3, 4, "fp16")
    assert (options.clip, options.loss_scale.initial) == (1.0, 2.0**16)
    assert options.offload.what == ("optimizer", "gradients")
    spaces = {b.role: b.space for b in compiled.program.buffers if b.is_persistent}
    assert spaces[Role.STATE] is spaces[Role.MASTER] is Space.HOST
    engine = compiled.engine()
    batch = load_model_file(model).batch()
    losses = [engine.step([batch] * 4).loss for _ in range(8)]
    engine.close()
    assert losses[-1] < losses[0]


def test_an_artefact_keeps_the_configuration(model: str, tmp_path: Path) -> None:
    config = {"steps_per_print": 5, "gradient_clipping": 2.5, "zero_optimization": {"stage": 2}}
    compiled = zeroir.compile(model, config=config, world_size=2, lr=0.1)
    compiled.save(tmp_path / "net.zir")
    record = artifact.load(tmp_path / "net.zir").config
    assert record is not None
    assert record == compiled.artifact.config
    assert dict(record.origins)["clip"] == "gradient_clipping"
    assert dict(record.origins)["stage"] == "zero_optimization.stage"
    assert dict(record.origins)["lr"] == "argument"
    (note,) = record.notes
    assert note.startswith("steps_per_print: no meaning here;")
    printed = str(zeroir.load(tmp_path / "net.zir"))
    assert printed.startswith("Options with the configuration\n")
    assert note in printed
    assert zeroir.load(tmp_path / "net.zir").config == record


@pytest.mark.slow
def test_a_script_follows_the_schedule_of_its_configuration(model: str) -> None:
    scheduler_block = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    config = {"scheduler": scheduler_block, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = zeroir.compile(model, config=config, world_size=1).engine()
    with pytest.raises(UserError, match="names no total: give it one, or pass the number of steps"):
        engine.scheduler()
    scheduler = engine.scheduler(steps=4)
    lrs = [scheduler.lr]
    for _ in range(4):
        engine.step(load_model_file(model).batch())
        scheduler.step()
        lrs.append(engine.optimizer.param_groups[0]["lr"])
    before_skip = scheduler.lr
    scheduler.step(is_skipped=True)
    assert scheduler.lr == before_skip
    engine.close()
    # DeepSpeed's warm-up over 1000 steps by the logarithm: 0 twice, then log(2)/log(1000) of 0.001.
    assert lrs[:2] == [0.0, 0.0]
    assert lrs[2:4] == pytest.approx([0.001 * math.log(n) / math.log(1000) for n in (2, 3)])
    plain = zeroir.compile(model, world_size=1).engine()
    with pytest.raises(UserError, match="compiled without a schedule"):
        plain.scheduler()
    plain.close()


@pytest.mark.slow
def test_a_plan_keeps_what_the_configuration_sets(model: str) -> None:
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 64}, "gradient_clipping": 0}
    result = plan(model, config=config, world_size=4, most_tried=20)
    options, collectives = result.compiled.options, result.compiled.options.communication
    assert (options.stage, collectives.bucket, collectives.bucket_gathers) == (1, 256, 0)
    assert result.compiled.artifact.config is not None


def test_without_a_configuration_there_is_no_record() -> None:
    result = resolve_options(None, {"world_size": 3}, no_source, giver="argument")
    assert result == ResolvedOptions(options=make_options({"world_size": 3}), record=None)


def test_options_of_one_place_are_not_compared_with_others() -> None:
    """GivenOptions has none of the validators that CompileOptions has for several options together."""
    assert CompileOptions.__pydantic_decorators__.model_validators
    assert not GivenOptions.__pydantic_decorators__.model_validators
    assert make_given_options({"nesterov": True, "world_size": 3}) == {
        "nesterov": True,
        "world_size": 3,
    }


def test_an_optimizer_in_hand_replaces_that_of_the_configuration() -> None:
    """As in DeepSpeed, where the client's optimizer wins over the block."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.5, 0.5]}}}
    compiled = zeroir.compile(
        net,
        torch.ones(2, 4),
        loss=lambda module, batch: module(batch).square().mean(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.25),
        config=config,
        world_size=1,
    )
    assert (compiled.options.optimizer.algorithm, compiled.options.optimizer.lr) == ("sgd", 0.25)
    assert compiled.config is not None
    assert compiled.config.notes == ("optimizer: replaced by optimizer=sgd.",)
