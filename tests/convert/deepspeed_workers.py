"""One rank of DeepSpeed that goes on from an exported checkpoint: ``python -m tests.convert.deepspeed_workers``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.convert import torch_workers
from tests.support.deepspeed_package import FOLDER, OWN_COLLECTIVES


def main() -> None:
    folder, stage, group_count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    warnings.simplefilter("ignore")  # DeepSpeed's and torch's, not ours
    torch_workers.join(folder)
    sys.path.insert(0, str(FOLDER))
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__[OWN_COLLECTIVES] = False
    torch.manual_seed(99)
    module = torch_workers.Net()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch_workers.optimizer_of(module, group_count),
        config={
            "train_micro_batch_size_per_gpu": 6 // dist.get_world_size(),
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": True},
        },
        dist_init_required=False,
    )
    engine.load_checkpoint(str(folder / "deepspeed"))
    assert engine.global_steps == torch_workers.STEPS_BEFORE
    losses = []
    for step in torch_workers.AFTER:
        part = torch_workers.batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = engine(part)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        (folder / "deepspeed.json").write_text(json.dumps(losses))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads on CPUs may abort the interpreter's exit.


if __name__ == "__main__":
    main()
