"""Hugging Face's vision transformer, tiny: patches by a convolution."""

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification


def model() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
        )
    )


def batch() -> dict[str, Tensor]:
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    return {"pixel_values": pixels, "labels": torch.tensor([1, 0])}
