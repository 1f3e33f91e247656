"""Hugging Face's Llama with the block of its 70-billion-parameter model; with 80 layers it is that model."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 2048


def layers_32() -> nn.Module:
    return _llama(32)


def layers_80() -> nn.Module:
    return _llama(80)


def batch() -> dict[str, Tensor]:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _llama(layers: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=layers,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=4096,
        )
    )
