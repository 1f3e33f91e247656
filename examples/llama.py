"""A Llama of Hugging Face's transformers, trained on bytes.

    zeroir compile 'examples/llama.py:model(layers=2)' --precision bf16 -o build/llama.zir

The forward of a transformers model returns an object with `loss` when it is given labels, so the file needs no `loss`,
and a batch is the dictionary of the forward's arguments. Pretrained weights are one line: `from_pretrained` instead of
the configuration. `zeroir export build/checkpoints --format hf` writes what `from_pretrained` reads.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).parent / "data" / "python-topics.txt"
LENGTH = 64
BATCH = 8

Batch = dict[str, Tensor]


def model(layers: int = 4, width: int = 128) -> nn.Module:
    """Build the model; `model(layers=2)` after the file's name on the command line builds a smaller one."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    llama: nn.Module = LlamaForCausalLM(config)
    return llama


def batch() -> Batch:
    """One rank's micro-batch by shape and type: (BATCH, LENGTH) each."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def batches(rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Batch]:
    """Yield this rank's batches for ever; (rank, world_size, seed, step) alone decide each of them."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    step = start_step
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - LENGTH, (world_size * BATCH, 1), generator=generator)
        own = starts[rank * BATCH : (rank + 1) * BATCH]
        tokens = text[own + torch.arange(LENGTH)]
        yield {"input_ids": tokens, "labels": tokens.clone()}  # the model itself shifts the labels
        step += 1
