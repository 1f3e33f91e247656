"""One rank of FSDP2 or DDP that goes on from an exported checkpoint: ``python -m tests.convert.torch_workers``."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard

from tests.support.replicated import replicated

STEPS_BEFORE: Final = 3
AFTER: Final = range(STEPS_BEFORE, STEPS_BEFORE + 5)
"""The steps after the checkpoint."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.inner = nn.Linear(10, 13)
        self.outer = nn.Linear(13, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = F.gelu(self.inner(self.norm(x)))
        outer: Tensor = self.outer(inner)
        return x + outer


class Net(nn.Module):
    """Odd sizes that no two ranks share evenly, a tied weight, a buffer, and a scalar that one rank alone can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("bias", torch.linspace(-1, 1, 11))
        self.head = nn.Linear(10, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x * self.gain) + self.get_buffer("bias")
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def optimizer_of(module: nn.Module, group_count: int = 2) -> torch.optim.AdamW:
    """One group, or two, of which the second has no decay and another learning rate."""
    decayed = [value for value in module.parameters() if value.ndim > 1 or group_count == 1]
    others = [value for value in module.parameters() if value.ndim <= 1]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups[:group_count], lr=1e-2, betas=(0.8, 0.95), foreach=False)


def batch(step: int) -> Tensor:
    return torch.randint(0, 11, (6, 6), generator=torch.Generator().manual_seed(step))


def take_steps(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of steps on this rank's part of each batch, averaged over the ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        loss: Tensor = module(batch(step).chunk(size)[rank])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
    return losses


def load_dcp(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load the model and the optimizer as torch's tutorial on DCP does."""
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state: dict[str, object] = {"model": model_state, "optim": optimizer_state}
    load(state, checkpoint_id=folder)
    # What was loaded is in the tensors, and in dictionaries that were filled in place.
    set_state_dict(
        module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )


def continued(kind: str, folder: Path) -> list[float]:
    """The losses after the checkpoint, of a module that began with other values."""
    torch.manual_seed(99)
    module: nn.Module = Net()
    match kind:
        case "fsdp2":
            for block in module.get_submodule("blocks").children():
                fully_shard(block)
            fully_shard(module)
        case "ddp":
            module = replicated(module)
    optimizer = optimizer_of(module)
    load_dcp(module, optimizer, folder / "dcp")
    for name, value in module.state_dict().items():
        assert value.numel(), name
    return take_steps(module, optimizer, AFTER)


def join(folder: Path) -> None:
    """Join the other ranks, which meet in a folder; a rank that hangs ends with the stacks of its threads."""
    faulthandler.dump_traceback_later(90, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def leave() -> None:
    """Leave the job together with the other ranks: none takes its connections away while another one needs them."""
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    join(folder)
    losses = continued(kind, folder)
    if dist.get_rank() == 0:
        (folder / f"{kind}.json").write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    main()
