"""The overhead of training from Python: the time of a script's own loop relative to that of `zeroir run`.

    python -m tools.bench_api [--model examples/gpt.py] [--steps 10] [--rounds 12]

One engine takes blocks of steps in turn: in the loop of `zeroir run`, and in the loop that a user would write, with a
scheduler of torch and the loss of every step. Each round takes one block of each, in alternating order; the ratio is
the median over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

import zeroir
from tools import record_file
from zeroir.frontend.source.entry import load_model_file
from zeroir.runtime.data.training_data import RankOfData, TrainingData, repeated
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.training.train import train
from zeroir.runtime.training.training_state import TrainingState
from zeroir.torch_ops.batches import Batch


def seconds(block: Callable[[], object]) -> float:
    """The wall-clock seconds of one block of steps."""
    start = time.perf_counter()
    block()
    return time.perf_counter() - start


def as_run_does(engine: Engine, batch: Batch, steps: int) -> None:
    """The training loop of `zeroir run`, without its output."""
    data = TrainingData(repeated(lambda: batch), RankOfData(rank=0, world_size=1, seed=0))
    training = TrainingState(engine=engine, data=data, scheduler=None, seed=0)
    train(training, steps=engine.step_count + steps, report=lambda _: None)


def as_users_do(
    engine: Engine,
    batch: Batch,
    steps: int,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """The loop of a script: a step, the scheduler, and the loss on the host."""
    for _ in range(steps):
        result = engine.step(batch)
        scheduler.step()
        float(result.loss)


def main() -> None:
    """Print the ratio for each stage."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = load_model_file(arguments.model).batch()
    rows = []
    for stage in range(4):
        engine = zeroir.compile(arguments.model, stage=stage, world_size=1).engine()
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.999**step)
        blocks = [
            partial(as_run_does, engine, batch, arguments.steps),
            partial(as_users_do, engine, batch, arguments.steps, scheduler),
        ]
        for block in blocks:
            block()
        ratios = []
        for turn in range(arguments.rounds):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            taken = {which: seconds(blocks[which]) for which in order}
            ratios.append(taken[1] / taken[0])
        engine.close()
        rows.append(
            [str(stage), f"{median(ratios):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"]
        )
    head = ["stage", "script / run, median", "least", "most"]
    about = {"model": arguments.model, "steps": arguments.steps, "rounds": arguments.rounds}
    record_file.publish(arguments.record, "bench_api", head, rows, about)


if __name__ == "__main__":
    main()
