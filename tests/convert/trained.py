"""A module that torch has trained for some steps, and its checkpoint in our format."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tests.convert import torch_workers as workers
from tests.runtime.support import Ranks, require_success
from tests.support.stored_modules import write_checkpoint
from zeroir.checkpoint.manifest import StoredGroup


def trained(group_count: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = workers.Net()
    optimizer = workers.optimizer_of(module, group_count)
    workers.take_steps(module, optimizer, range(workers.STEPS_BEFORE))
    return module, optimizer


def require_two_ranks_go_on(
    kind: str, folder: Path, expected: Sequence[float], *, rtol: float
) -> None:
    """Fail unless two ranks of torch continue with these losses; they add gradients in another order."""
    ranks = Ranks(2, folder, kind, str(folder), module="tests.convert.torch_workers")
    require_success(ranks.wait())
    losses = json.loads((folder / f"{kind}.json").read_text())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=0)


def write_trained(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, rank_count: int
) -> None:
    """Write a checkpoint of a module and its AdamW, with our names of states and groups."""
    names = {value: name for name, value in module.named_parameters()}
    states = {
        quantity: {name: optimizer.state[value][quantity] for value, name in names.items()}
        for quantity in ("exp_avg", "exp_avg_sq")
    }
    groups = [
        StoredGroup(
            name=f"group{index}",
            algorithm="adamw",
            settings={key: group[key] for key in ("lr", "betas", "eps", "weight_decay")},
            parameters=tuple(names[value] for value in group["params"]),
        )
        for index, group in enumerate(optimizer.param_groups)
    ]
    write_checkpoint(
        path,
        module,
        rank_count=rank_count,
        flat_count=3,
        step=workers.STEPS_BEFORE,
        states=states,
        groups=groups,
    )
