"""A deferred module's tensors equal, bit for bit, those of a module built at once; and no whole model is ever held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples import gpt
from zeroir.runtime.deferred import build_deferred


def with_orthogonal() -> nn.Module:
    module = nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100))
    linear = module[0]
    assert isinstance(linear, nn.Linear)
    nn.init.orthogonal_(linear.weight)
    with torch.no_grad():
        linear.weight[10].zero_()
        linear.weight.mul_(1 / linear.weight.std().item())
    return module


def with_truncation() -> nn.Module:
    """An initialiser that redraws what falls outside, as often as the values demand."""
    module = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Embedding(1000, 64, padding_idx=3))
    for parameter in module.parameters():
        nn.init.trunc_normal_(parameter, a=-1.0, b=1.0)
    return module


def with_generator() -> nn.Module:
    module = nn.Linear(100, 100)
    nn.init.uniform_(module.weight, generator=torch.Generator().manual_seed(5))
    return nn.Sequential(module, nn.Linear(100, 100)).double()


def with_tables() -> nn.Module:
    """Buffers that are computed, not drawn."""
    module = nn.Linear(64, 64)
    module.register_buffer("mask", torch.ones(100, 100).tril())
    module.register_buffer("angles", torch.outer(torch.arange(128.0), 1 / torch.arange(1.0, 65.0)))
    return module


def with_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


FACTORIES: list[Callable[[], nn.Module]] = [
    gpt.model,
    with_orthogonal,
    with_truncation,
    with_generator,
    with_tables,
    with_encoder,
    lambda: nn.LSTM(64, 64),
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_every_tensor_equals_that_of_a_whole_module(factory: Callable[[], nn.Module]) -> None:
    torch.manual_seed(7)
    expected = factory()
    state_before = torch.get_rng_state()
    module, recording = build_deferred(factory, 7)
    assert torch.equal(torch.get_rng_state(), state_before)
    names = [name for name, _ in [*expected.named_parameters(), *expected.named_buffers()]]
    found = dict([*module.named_parameters(), *module.named_buffers()])
    # In reverse, because no tensor's replay may depend on another's.
    for name in reversed(names):
        value = dict([*expected.named_parameters(), *expected.named_buffers()])[name]
        assert torch.equal(recording.materialise(found[name]), value.detach()), name


@pytest.mark.slow
def test_hugging_face_models_can_be_deferred() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=1000,
    )
    torch.manual_seed(3)
    expected = transformers.LlamaForCausalLM(config)
    module, recording = build_deferred(lambda: transformers.LlamaForCausalLM(config), 3)
    for (name, value), (_, found) in zip(
        expected.named_parameters(), module.named_parameters(), strict=True
    ):
        assert torch.equal(recording.materialise(found), value.detach()), name


def test_large_tensors_take_no_memory() -> None:
    module, recording = build_deferred(lambda: nn.Sequential(*[nn.Linear(512, 512)] * 3), 0)
    for parameter in module.parameters():
        assert parameter.is_meta == (parameter.numel() >= 4096)
        assert recording.materialise(parameter).shape == parameter.shape
