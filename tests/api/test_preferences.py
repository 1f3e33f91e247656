"""Preference losses of adapters: the reference is the model itself with its adapter off."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroir

pytestmark = [
    pytest.mark.slow,
    # peft asks for it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
]
TOKENS = 50


def with_adapter() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    # Otherwise the first step has a loss of log 2 whether the adapter is off or not.
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), lora)


def log_likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))


def preferring(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:  # noqa: ANN401 - peft's
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290)."""
    chosen, rejected = batch
    with torch.no_grad(), model.disable_adapter():
        reference = log_likelihood(model, chosen) - log_likelihood(model, rejected)
    margin = log_likelihood(model, chosen) - log_likelihood(model, rejected)
    return -F.logsigmoid(0.1 * (margin - reference)).mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_the_adapter_is_off_in_the_reference_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(TOKENS, (3, 2, 2, 8), generator=generator)
    model, plain = with_adapter(), with_adapter()
    own = torch.optim.AdamW(trained(model), lr=0.01)
    optimizer = torch.optim.AdamW(trained(plain), lr=0.01, fused=True)
    first = (batches[0, 0], batches[0, 1])
    made = zeroir.compile(
        model, first, loss=preferring, stage=3, optimizer=own, world_size=1, evaluate=False
    )
    engine = made.engine(self_check=False)
    for chosen, rejected in batches:
        loss = preferring(plain, (chosen, rejected))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step((chosen, rejected)).loss == loss.item()
    engine.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
