"""A Llama whose adapters of peft alone are trained: the base model is frozen, and sharded all the same.

    torchrun --standalone --nproc-per-node 2 examples/lora.py

trains, saves the adapters as peft does, and lets peft load them. It is a model file, too: `zeroir compile
examples/lora.py`. Frozen parameters have no gradients, no optimizer states and no master weights, so a rank holds its
shard of the base model and, for a moment, one unit of it whole.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zeroir

TEXT = Path(__file__).parent / "data" / "python-topics.txt"
LENGTH = 32
BATCH = 8
STEPS = 40
FOLDER = Path("adapters")

Batch = dict[str, Tensor]


def base() -> LlamaForCausalLM:
    """Make the model to adapt. A real one comes by `LlamaForCausalLM.from_pretrained`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def model() -> PeftModel:
    """Make the base model with adapters beside its attention and its MLP."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.1
    )
    adapted = get_peft_model(base(), config)
    assert isinstance(adapted, PeftModel)
    return adapted


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
        yield {"input_ids": tokens, "labels": tokens.clone()}
        step += 1


def main() -> None:
    """Train the adapters, save them, and compare the model that peft loads with the one that was trained."""
    adapted = model()
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    engine = zeroir.compile(adapted, batch(), optimizer=optimizer, stage=3, clip=1.0).engine()
    stream = batches(engine.rank, engine.world_size, seed=0)
    for step in range(1, STEPS + 1):
        loss = engine.step(next(stream)).mean_loss
        if engine.rank == 0 and step in (1, STEPS):
            print(f"step {step:3}  loss {loss:.4f}")

    # The base model stays in its shards: rank 0 gathers the adapters alone.
    trained = engine.state_dict(rank0_only=True, only_trained=True)
    held_out = next(batches(0, 1, seed=1))
    evaluated = engine.evaluate(held_out).loss
    engine.close()
    if engine.rank == 0:
        adapted.save_pretrained(str(FOLDER), state_dict=trained)
        loaded = PeftModel.from_pretrained(base(), str(FOLDER)).eval()
        loss = loaded(**held_out).loss.item()
        print(f"held-out loss {evaluated:.4f}; with the adapters as peft loads them {loss:.4f}")


if __name__ == "__main__":
    main()
