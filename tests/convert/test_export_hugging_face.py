"""What ``--format hf`` writes, read by transformers and safetensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.stored_modules import write_checkpoint
from zeroir.convert.export import ExportReport, export_checkpoint
from zeroir.convert.formats import MAX_SHARD_BYTES
from zeroir.errors import UserError

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(*, tied: bool = False) -> PreTrainedModel:
    config = LlamaConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=tied
    )
    return LlamaForCausalLM(config)


GPT2 = GPT2Config(vocab_size=67, n_positions=16, n_embd=32, n_layer=2, n_head=4)
T5 = T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
BERT = BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=16)
MODELS = {
    "llama": llama(),
    "llama-tied": llama(tied=True),
    "gpt2": GPT2LMHeadModel(GPT2),
    "t5": T5ForConditionalGeneration(T5),
    "bert": BertForMaskedLM(BERT),
}
TIED_NAMES = {
    "llama": [],
    "llama-tied": ["lm_head.weight"],
    "gpt2": ["lm_head.weight"],
    "t5": ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
    "bert": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
}


def exported(
    folder: Path, model: nn.Module, *, rank_count: int = 3, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ExportReport:
    config = (
        json.loads(model.config.to_json_string()) if isinstance(model, PreTrainedModel) else None
    )
    write_checkpoint(folder / "step-00000004", model, rank_count=rank_count, step=4, config=config)
    return export_checkpoint(str(folder), folder / "out", to="hf", max_shard_bytes=max_shard_bytes)


def names_in(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                assert name not in shapes
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


@pytest.mark.parametrize("rank_count", [1, 3, 7])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_every_bit(name: str, rank_count: int, tmp_path: Path) -> None:
    model = MODELS[name]
    report = exported(tmp_path, model, rank_count=rank_count)
    answer: object = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert isinstance(answer, tuple)
    loaded, told = answer
    assert not any(told[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, value in loaded.state_dict().items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key
    assert (report.notes, report.step) == ((), 4)
    # A tied tensor is written once under the name that is the source.
    shapes = names_in(tmp_path / "out")
    assert shapes.keys() == model.state_dict().keys() - set(TIED_NAMES[name])
    assert sorted(model.all_tied_weights_keys) == sorted(TIED_NAMES[name])
    assert all(0 not in shape for shape in shapes.values())


def test_each_name_is_written_where_the_configuration_ties_nothing(tmp_path: Path) -> None:
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    exported(tmp_path, model)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)


def test_shards_with_an_index(tmp_path: Path) -> None:
    model = MODELS["llama-tied"]
    exported(tmp_path, model, max_shard_bytes=20_000)
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n, _ in enumerate(files, 1)]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(
        value.nbytes for value in {id(p): p for p in model.parameters()}.values()
    )
    for name in files:
        with safe_open(out / name, framework="pt") as file:
            keys = list(file.keys())
        assert keys
        size_bytes = (out / name).stat().st_size
        assert size_bytes < 20_000 + 4_000 or len(keys) == 1
    loaded = LlamaForCausalLM.from_pretrained(out)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_another_dtype_is_rounded_as_torch_rounds(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0, :4] = torch.tensor([float("nan"), float("inf"), 3.4e38, 1e-40])
    config = json.loads(model.config.to_json_string())
    write_checkpoint(tmp_path / "c", model, config=config)
    export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="hf", dtype="bf16")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for key, value in loaded.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(
            value.view(torch.int16), model.state_dict()[key].to(torch.bfloat16).view(torch.int16)
        )


def test_averages_in_the_place_of_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    ema = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    write_checkpoint(tmp_path / "c", model, states={"ema": ema})
    export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="hf", use_ema=True)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        for name, value in model.named_parameters():
            expected = ema[name] if value.requires_grad else value
            assert torch.equal(file.get_tensor(name), expected)


def test_a_checkpoint_without_averages_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    with pytest.raises(UserError, match="saved without an average"):
        export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="hf", use_ema=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_parameter_with_the_name_of_the_metadata_is_refused(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    write_checkpoint(tmp_path / "c", module)
    with pytest.raises(UserError, match="no tensor '__metadata__', which is the name of its"):
        export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    export_checkpoint(str(tmp_path / "c"), tmp_path / "weights.pt", to="state-dict")
    assert torch.load(tmp_path / "weights.pt", weights_only=True).keys() == {"__metadata__"}


class Wrapped(nn.Module):
    """A model of another library within a module that has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.network = llama(tied=True)


def test_a_model_within_a_module_is_written_under_its_own_names(tmp_path: Path) -> None:
    module = Wrapped()
    config = json.loads(module.network.config.to_json_string())
    write_checkpoint(tmp_path / "c", module, config=config, config_owner="network")
    report = export_checkpoint(str(tmp_path / "c"), tmp_path / "out", to="hf")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for key, value in module.network.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert len(report.notes) == 1
    assert "temperature" in report.notes[0]


def test_buffers_that_state_dict_has_are_written_and_the_others_not(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    report = exported(tmp_path, model)
    shapes = names_in(tmp_path / "out")
    assert shapes == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert "config.json" in report.notes[0]
    assert not (tmp_path / "out" / "config.json").exists()
