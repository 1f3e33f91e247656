"""Write the checkpoints of ``tests/data/deepspeed_checkpoints`` with DeepSpeed itself, on CPUs.

``python -m torch.distributed.run --nproc-per-node RANKS tools/record_deepspeed_checkpoints.py FOLDER STAGE PRECISION``

The folder gets the checkpoint of the third step, and ``losses.json`` with the mean losses of the five
steps after it.
DeepSpeed 0.19.2 wrote those of the tests: stage 1 in BF16 by 2 ranks, stage 2 in FP16 by 3, stage 3 in FP32 by 3.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from tests.convert.deepspeed_model import BETAS, LR, STEPS_AFTER, STEPS_BEFORE, Net, batch


def main(folder: Path, stage: int, precision: str) -> None:
    """Train, save and train on."""
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.manual_seed(0)
    module = Net()
    trained = [value for value in module.parameters() if value.requires_grad]
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if precision == "fp16":
        # The scale does not grow: DeepSpeed divides the gradients of such a step by the new scale.
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif precision != "fp32":
        config[precision] = {"enabled": True}
    optimizer = None
    if stage == 2:
        config["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": LR, "betas": BETAS, "weight_decay": 0.1, "torch_adam": True},
        }
    else:
        optimizer = torch.optim.AdamW(
            [
                {"params": [value for value in trained if value.ndim > 1], "weight_decay": 0.1},
                {"params": [value for value in trained if value.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=LR,
            betas=BETAS,
        )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=None if optimizer is not None else trained,
        config=config,
    )
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step + 1 == STEPS_BEFORE:
            engine.save_checkpoint(folder)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses[STEPS_BEFORE:]) + "\n")
        (folder / "zero_to_fp32.py").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
