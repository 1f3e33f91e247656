"""Hugging Face's Llama, tiny: grouped-query attention, rotary positions kept in a buffer, an output object."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.0,
        )
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(2 * 12).reshape(2, 12) * 5 % 64
    return {"input_ids": tokens, "labels": tokens.clone()}
