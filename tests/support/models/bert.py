"""Hugging Face's BERT for masked tokens, tiny: a padding mask, a tied decoder with a bias of its own."""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM


def model() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=32,
        )
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(2 * 12).reshape(2, 12) * 5 % 64
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
