"""One training step of the comparison's GPT, by each system; all with the fused AdamW of torch and its defaults.

Every contestant is built inside its own processes, which are ranks of a gloo job already.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.peers import gpt
from tools.peers.gpt_model import GPT, Batch, TakeStep, training_step

LEARNING_RATE = 1e-3
SEED = 0


def build(name: str, folder: Path) -> TakeStep:
    """The contestant of that name; ``folder`` holds the compiled programs of zeroir's own."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    match name.split():
        case ["torch", "alone"]:
            return _loop(_model())
        case ["DDP"]:
            from torch.nn.parallel import DistributedDataParallel

            return _loop(DistributedDataParallel(_model(), gradient_as_bucket_view=True))
        case ["ZeroRedundancyOptimizer"]:
            return _zero_redundancy()
        case ["FSDP2"]:
            return _loop(_fully_sharded(is_compiled=False))
        case ["FSDP2", "compiled"]:
            return _loop(_fully_sharded(is_compiled=True))
        case ["DeepSpeed", stage]:
            return _deepspeed(int(stage))
        case ["zeroir", *_]:
            # Only here, so that the others' memory has nothing of zeroir in it.
            from tools.peers import own

            return own.build(folder / f"{name}.zir", own.variants(dist.get_world_size())[name])
        case _:
            raise ValueError(f"there is no contestant {name}")


def _model() -> GPT:
    torch.manual_seed(SEED)
    return gpt.model()


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TakeStep:
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return training_step(model, adamw if optimizer is None else optimizer)


def _zero_redundancy() -> TakeStep:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return _loop(model, optimizer)


def _fully_sharded(*, is_compiled: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if is_compiled:
        for block in model.blocks:
            block.compile()
    return model


def _deepspeed(stage: int) -> TakeStep:
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": gpt.BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # newer versions clip at 1.0 where nothing is said
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
