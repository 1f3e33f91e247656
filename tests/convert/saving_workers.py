"""One rank of FSDP2 or DDP that trains, saves with DCP and goes on: ``python -m tests.convert.saving_workers``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from tests.convert.torch_workers import (
    AFTER,
    STEPS_BEFORE,
    Net,
    join,
    leave,
    optimizer_of,
    take_steps,
)
from tests.support.replicated import replicated


def main(kind: str, folder: Path) -> None:
    """Write ``dcp`` after the first steps, and the losses of the steps after them to ``losses.json``."""
    join(folder)
    torch.manual_seed(0)
    module: nn.Module = Net()
    match kind:
        case "fsdp2":
            for block in module.get_submodule("blocks").children():
                fully_shard(block)
            fully_shard(module)
        case "ddp":
            module = replicated(module)
    optimizer = optimizer_of(module)
    take_steps(module, optimizer, range(STEPS_BEFORE))
    model_state, optimizer_state = get_state_dict(module, optimizer)
    save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / "dcp")
    losses = take_steps(module, optimizer, AFTER)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
