"""Hugging Face's GPT-2, tiny: a tied head, attention with dropout."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def model() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(2 * 12).reshape(2, 12) * 5 % 64
    return {"input_ids": tokens, "labels": tokens.clone()}
