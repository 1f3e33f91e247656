"""The loss of a training with optimizer states of 8 bits relative to that with FP32 states.

    python -m tools.bench_eight_bit [--model examples/gpt.py] [--steps 2000] [--optimizer adamw] [--seeds 0]

Both trainings take the same batches from the same first values, at a learning rate that rises for 5 % of the steps and
falls along a cosine. The final loss is the mean over the last 100 steps. The bytes of the states and the seconds of a
step are measured, too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import mean
from typing import Literal

import torch

import zeroir
from tools import record_file
from zeroir.errors import UserError
from zeroir.frontend.entry import load_model_file
from zeroir.ir.buffers import Role
from zeroir.ir.ops import Algorithm

Bits = Literal[32, 8]
BITS: tuple[Bits, ...] = (32, 8)

LAST = 100
"""The final steps whose losses are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training: its losses step by step, the bytes of its states for each parameter, and its seconds of a step."""

    losses: list[float]
    state_bytes_per_parameter: float
    seconds_per_step: float

    @property
    def final_loss(self) -> float:
        """The mean loss of the last steps."""
        return mean(self.losses[-LAST:])


def learning_rate_factor(step: int, steps: int) -> float:
    """A rise over the first 5 % of the steps, then half a cosine down to a tenth."""
    rise = max(steps // 20, 1)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(steps - rise, 1))


def train(
    model: str, *, optimizer: Algorithm, bits: Bits, steps: int, lr: float, seed: int
) -> Training:
    """Train a model file whose ``batches`` give the data."""
    compiled = zeroir.compile(
        model, world_size=1, stage=0, optimizer=optimizer, optimizer_bits=bits, lr=lr, clip=1.0
    )
    program = compiled.program
    states_bytes = sum(b.size_bytes for b in program.buffers if b.role is Role.STATE)
    source = load_model_file(model).batches
    if source is None:
        raise UserError(f"{model} has no batches() to train on.")
    batches = iter(source(0, 1, seed))
    engine = compiled.engine(seed=seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        engine.optimizer, lambda step: learning_rate_factor(step, steps)
    )
    losses: list[float] = []
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(float(engine.step(next(batches)).loss))
        scheduler.step()
    seconds = (time.perf_counter() - start) / steps
    engine.close()
    return Training(
        losses=losses,
        state_bytes_per_parameter=states_bytes / program.parameters_numel,
        seconds_per_step=seconds,
    )


def main() -> None:
    """Print the final losses, and the difference."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--optimizer", type=Algorithm, default=Algorithm.ADAMW)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in arguments.seeds:
        trainings = {
            bits: train(
                arguments.model,
                optimizer=arguments.optimizer,
                bits=bits,
                steps=arguments.steps,
                lr=arguments.lr,
                seed=seed,
            )
            for bits in BITS
        }
        for bits, training in trainings.items():
            difference = training.final_loss / trainings[32].final_loss - 1
            rows.append(
                [
                    str(seed),
                    str(bits),
                    f"{training.final_loss:.4f}",
                    f"{100 * difference:+.2f} %",
                    f"{training.state_bytes_per_parameter:.3f}",
                    f"{1000 * training.seconds_per_step:.1f}",
                ]
            )
    head = ["seed", "bits", "final loss", "difference", "bytes of states a parameter", "ms a step"]
    about = {
        "model": arguments.model,
        "steps": arguments.steps,
        "optimizer": arguments.optimizer.value,
        "lr": arguments.lr,
    }
    record_file.publish(arguments.record, "bench_eight_bit", head, rows, about)


if __name__ == "__main__":
    main()
