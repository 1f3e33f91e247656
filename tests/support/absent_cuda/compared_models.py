"""The models whose graphs for a CPU and for CUDA are compared: those of transformers in tiny, and layers of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

from tests.support.absent_cuda.layers import LAYERS

TYPES: Final = {
    "causal": (
        *("llama", "gpt2", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "phi", "opt"),
        *("stablelm", "gpt_neox", "bloom", "olmo2"),
    ),
    "masked": (
        *("bert", "roberta", "camembert", "xlm-roberta", "distilbert", "albert", "electra"),
        "mpnet",
    ),
    "seq2seq": ("t5",),
    "image": ("vit", "convnext", "regnet", "beit"),
}
"""Types of models of transformers, by kind."""

NAMES: Final = (*LAYERS, *(f"{kind}/{name}" for kind, names in TYPES.items() for name in names))


class Made(NamedTuple):
    """A model with an example batch, and the function of its loss if it does not return that."""

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    loss: Callable[..., object] | None


def made(name: str) -> Made:
    """Make a model of this name."""
    torch.manual_seed(0)
    if name in LAYERS:
        make, batch = LAYERS[name]
        return Made(make(), batch(), None)
    from tools.tiny_models import form_of, tiny

    kind, of_type = name.split("/")
    form = form_of(kind, tiny(kind, of_type))
    return Made(tiny(kind, of_type), form.batch(), form.loss)
