"""A deferred module's tensors equal, bit for bit, those of a module built at once; and no whole model is ever held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples import gpt
from tests.runtime.test_draws import Filled
from zeroir.runtime.deferred import build_deferred
from zeroir.runtime.state import build


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


def with_states() -> nn.Module:
    """Seeds and states in the middle: one that is put back, one that is set, one that is drawn from at once."""
    first = nn.Linear(100, 100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        second = nn.Linear(100, 100)
    third = nn.Linear(100, 100)
    state = torch.get_rng_state()
    third.register_buffer("order", torch.randperm(100))
    fourth = nn.Linear(100, 100)
    torch.set_rng_state(state)
    fifth = nn.Linear(100, 100)
    torch.manual_seed(int(torch.randint(0, 1000, ()).item()))
    sixth = nn.Linear(100, 100)
    nn.init.normal_(sixth.weight, std=0.02)
    fifth.register_buffer("noise", torch.randn(100, 100) + torch.rand(100))
    return nn.Sequential(first, second, third, fourth, fifth, sixth)


def with_parts() -> nn.Module:
    """Random numbers for a part of a tensor, and a small tensor whose values decide."""
    module = nn.Linear(100, 100)
    with torch.no_grad():
        module.weight[:50].normal_()
        module.weight[:, ::2].uniform_()
        if module.bias.abs().max() > 0:
            module.bias.copy_(torch.randn(100))
        module.weight.t().mul_(module.bias)
    return module


FACTORIES: list[Callable[[], nn.Module]] = [
    gpt.model,
    with_orthogonal,
    with_truncation,
    with_generator,
    with_tables,
    with_encoder,
    with_states,
    with_parts,
    lambda: nn.LSTM(64, 64),
]


@pytest.mark.parametrize("is_lazy", [True, False])
@pytest.mark.parametrize("factory", FACTORIES)
def test_every_tensor_equals_that_of_a_whole_module(
    factory: Callable[[], nn.Module], is_lazy: bool
) -> None:
    torch.manual_seed(7)
    expected = factory()
    state_before = torch.get_rng_state()
    module, recording = build_deferred(factory, 7, is_lazy=is_lazy)
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
    def factory() -> nn.Module:
        module = nn.Sequential(*[nn.Linear(512, 512)] * 3)
        module.register_buffer("small", torch.zeros(4095))
        module.register_buffer("large", torch.zeros(4096))
        return module

    for is_lazy in (True, False):
        module, recording = build_deferred(factory, 0, is_lazy=is_lazy)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            is_small = name == "small" or (not is_lazy and name.endswith("bias"))
            assert tensor.is_meta != is_small
            assert recording.materialise(tensor).shape == tensor.shape


def test_values_are_made_in_place() -> None:
    torch.manual_seed(2)
    expected = gpt.model()
    module, recording = build_deferred(gpt.model, 2)
    for (name, value), parameter in zip(
        expected.named_parameters(), module.parameters(), strict=True
    ):
        place = torch.full((value.numel() + 64,), 7.0)
        made = recording.materialise(parameter, place[64:])
        assert made.data_ptr() == place[64:].data_ptr(), name
        assert torch.equal(made, value.detach()), name
        assert bool((place[:64] == 7).all()), name


def drawn_numel(run: Callable[[], object]) -> int:
    filled = Filled()
    with filled:
        run()
    return filled.numel


def test_in_the_order_of_positions_each_parameter_is_drawn_once() -> None:
    """Of what a linear layer draws and the model draws again, nothing but the generator's state is worked out."""
    module, recording = build_deferred(gpt.model, 0)
    parameters = sorted(module.parameters(), key=recording.position)
    drawn = drawn_numel(lambda: [recording.materialise(one) for one in parameters])
    random = [p for p in parameters if recording.position(p) >= 0]
    assert len(random) > 5
    # Besides, how torch draws is tried out on a few thousand elements, and a short tensor is drawn in passing.
    assert drawn <= sum(p.numel() for p in random) + (1 << 16)
    assert drawn < drawn_numel(gpt.model)


def reads_numpy() -> nn.Module:
    module = nn.Linear(100, 100)
    nn.init.constant_(module.weight, float(module.bias.detach().numpy()[0]))
    return module


def reads_a_list() -> nn.Module:
    module = nn.Linear(100, 100)
    nn.init.constant_(module.weight, module.bias.tolist()[0])
    return module


def sets_a_foreign_state() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    torch.empty(10).uniform_(generator=generator)
    torch.set_rng_state(generator.get_state())
    return nn.Linear(100, 100)


@torch.library.custom_op("zeroir_tests::noise", mutates_args=())
def noise(like: torch.Tensor) -> torch.Tensor:
    """An operator that draws and does not say so."""
    return torch.rand(like.shape)


def draws_in_secret() -> nn.Module:
    module = nn.Linear(100, 100)
    with torch.no_grad():
        module.bias.copy_(noise(torch.zeros(100)))
    return module


@pytest.mark.parametrize(
    "factory", [reads_numpy, reads_a_list, sets_a_foreign_state, draws_in_secret]
)
def test_what_cannot_be_drawn_later_is_drawn_at_once(factory: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    expected = factory()
    source = build(factory, 4)
    assert torch.equal(source.tensor("weight"), expected.get_parameter("weight"))
    assert torch.equal(source.tensor("bias"), expected.get_parameter("bias"))


def test_values_are_on_the_cpu_whatever_the_default_device_is() -> None:
    torch.manual_seed(9)
    expected = gpt.model()
    module, recording = build_deferred(gpt.model, 9)
    with torch.device("meta"):
        made = {name: recording.materialise(one) for name, one in module.named_parameters()}
    for name, value in expected.named_parameters():
        assert torch.equal(made[name], value.detach()), name
