"""Hugging Face's Llama, tiny, on documents that `DataCollatorWithFlattening` puts one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

VOCABULARY, LONGEST = 64, 48
Tokens = dict[str, Tensor]


def model() -> nn.Module:
    """Make the model, without a cache: with one, transformers lets documents see each other."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "use_cache": False,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig.from_dict(settings))


def packed(*lengths: int, seed: int = 0) -> Tokens:
    """Draw documents of these lengths in one row."""
    chance = torch.Generator().manual_seed(seed)
    documents = [torch.randint(VOCABULARY, (n,), generator=chance).tolist() for n in lengths]
    collate = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    return dict(collate([{"input_ids": each} for each in documents]))


def documents_of(batch: Tokens) -> list[Tokens]:
    """Return the documents of a batch, each as a batch of its own."""
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), None]
    names = ("input_ids", "labels")
    return [
        {name: batch[name][:, start:end] for name in names}
        for start, end in itertools.pairwise(starts)
    ]


def batch() -> Tokens:
    """Return two documents; other batches have other borders."""
    return packed(5, 7)


def shapes() -> dict[str, tuple[int, Dim]]:
    """Say that the length differs."""
    length = Dim("length", min=2, max=LONGEST)
    return dict.fromkeys(("input_ids", "labels", "position_ids"), (1, length))


def batches(rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Tokens]:
    """Yield one to four documents of random lengths."""
    step = start_step
    while True:
        here = (seed * 1009 + step) * world_size + rank
        chance = torch.Generator().manual_seed(here)
        count = int(torch.randint(1, 5, (1,), generator=chance))
        lengths = torch.randint(2, LONGEST // 4 + 1, (count,), generator=chance).tolist()
        yield packed(*lengths, seed=here)
        step += 1
