"""Models of published sizes for `tools.bench_offload`, in the shapes of their papers; no weight is ever allocated.

The 10 billion parameters are those of DeepSpeed's tutorial on ZeRO-Offload (50 layers of width 4,096, batches of 10),
13 and 70 billion those of Llama 2 (Touvron et al. 2023), and 175 billion those of GPT-3 (Brown et al. 2020). 740
million parameters are 12 layers of width 2,048.
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LENGTHS = {
    "gpt_740m": 1024,
    "gpt_10b": 1024,
    "llama_13b": 2048,
    "llama_70b": 2048,
    "gpt_175b": 2048,
}
"""Tokens of a sequence, by model."""


def module(name: str) -> nn.Module:
    """A model by its name, on the meta device."""
    with torch.device("meta"):
        match name:
            case "gpt_740m":
                return _gpt(width=2048, layers=12, heads=16, length=LENGTHS[name])
            case "gpt_10b":
                return _gpt(width=4096, layers=50, heads=32, length=LENGTHS[name])
            case "llama_13b":
                return _llama(width=5120, inner=13824, layers=40, heads=40, groups=40)
            case "llama_70b":
                return _llama(width=8192, inner=28672, layers=80, heads=64, groups=8)
            case "gpt_175b":
                return _gpt(width=12288, layers=96, heads=96, length=LENGTHS[name])
            case _:
                raise ValueError(name)


def batch(name: str, size: int) -> dict[str, Tensor]:
    """A batch of so many sequences for the model of that name."""
    tokens = torch.zeros(size, LENGTHS[name], dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _gpt(*, width: int, layers: int, heads: int, length: int) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50257,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=length,
            use_cache=False,
        )
    )


def _llama(*, width: int, inner: int, layers: int, heads: int, groups: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            max_position_embeddings=4096,
        )
    )
