"""Hugging Face's T5, tiny: an encoder, a decoder, and attention whose learned bias all layers share."""

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration


def model() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config.from_dict(
            {
                "vocab_size": 64,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 0,
            }
        )
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(2 * 12).reshape(2, 12) * 5 % 64
    return {"input_ids": tokens, "labels": tokens[:, :7].clone()}
