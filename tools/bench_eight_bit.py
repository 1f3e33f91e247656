"""The loss of a training with optimizer states of 8 bits relative to that with FP32 states.

    python -m tools.bench_eight_bit [--model examples/gpt.py] [--steps 2000] [--optimizer adamw] [--seeds 0]
    python -m tools.bench_eight_bit --update

Both trainings take the same batches from the same first values, at a learning rate that rises for 5 % of the steps and
falls along a cosine to a tenth. The final loss is the mean over the last 100 steps. With ``--update`` the processor
time of AdamW's update is measured instead, for an element of a flat that is larger than the caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Literal

import torch

import zeroir
from tools import record_file
from zeroir.errors import UserError
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.buffers import Role
from zeroir.ir.eight_bit_states import blocks_numel
from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.forms import is_signed
from zeroir.runtime.eight_bit.compiled_rounding import CompiledRounding
from zeroir.runtime.eight_bit.update import CodedState, CodedUpdate
from zeroir.runtime.optimizers.adam import adamw
from zeroir.runtime.optimizers.chunked_update import GroupPieces
from zeroir.runtime.optimizers.operands import Operands

Bits = Literal[32, 8]
BITS: tuple[Bits, ...] = (32, 8)

LAST = 100
"""The final steps whose losses are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training: its losses step by step, and the bytes of its states for each parameter."""

    losses: list[float]
    state_bytes_per_parameter: float

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
    for _ in range(steps):
        losses.append(float(engine.step(next(batches)).loss))
        scheduler.step()
    engine.close()
    return Training(
        losses=losses, state_bytes_per_parameter=states_bytes / program.parameters_numel
    )


UPDATED_NUMEL = 1 << 24
"""The elements of the flat whose update is timed."""

UPDATES = 7
"""The updates of which the fastest counts."""


def update_rows() -> list[list[str]]:
    """The least processor time of an element in several updates, which take turns, for each kind of states."""
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(UPDATED_NUMEL, generator=generator) for _ in range(2))
    operands = Operands(
        params=[param],
        grads=[grad],
        states=[[torch.zeros(UPDATED_NUMEL)] for _ in range(2)],
        step=torch.ones(1),
        lr=torch.tensor([1e-3], dtype=torch.float64),
        hyper=torch.tensor([0.9, 0.999, 1e-8, 0.01], dtype=torch.float64),
        divisor=torch.ones(1),
        skip=None,
    )
    coded = CodedUpdate(
        algorithm=Algorithm.ADAMW,
        param=param,
        grad=grad,
        states=[
            CodedState(
                codes=torch.zeros(UPDATED_NUMEL, dtype=torch.uint8),
                absmax=torch.zeros(blocks_numel(UPDATED_NUMEL)),
                signed=is_signed(name),
            )
            for name in Algorithm.ADAMW.state_names
        ],
        groups=[GroupPieces(pieces=[slice(0, UPDATED_NUMEL)], operands=operands)],
        skip=None,
    )
    updates: dict[tuple[int, str], Callable[[], None]] = {
        (32, "torch's fused kernel"): partial(adamw, operands),
        (8, "torch's operators"): coded,
        (8, "compiled"): replace(coded, compiled=CompiledRounding()),
    }
    least_s = dict.fromkeys(updates, math.inf)
    for _ in range(UPDATES):
        for kind, update in updates.items():
            least_s[kind] = min(least_s[kind], processor_seconds(update))
    return [
        [str(bits), kernels, f"{seconds / UPDATED_NUMEL * 1e9:.1f}"]
        for (bits, kernels), seconds in least_s.items()
    ]


def processor_seconds(update: Callable[[], None]) -> float:
    """The processor seconds of one update."""
    start = time.process_time()
    update()
    return time.process_time() - start


def main() -> None:
    """Print the final losses and the difference, or the time of an update."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--optimizer", type=Algorithm, default=Algorithm.ADAMW)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.update:
        head = ["bits", "kernels", "ns an element"]
        about = {"elements": UPDATED_NUMEL}
        record_file.publish(arguments.record, "bench_eight_bit", head, update_rows(), about)
        return
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
                ]
            )
    head = ["seed", "bits", "final loss", "difference", "bytes of states a parameter"]
    about = {
        "model": arguments.model,
        "steps": arguments.steps,
        "optimizer": arguments.optimizer.value,
        "lr": arguments.lr,
    }
    record_file.publish(arguments.record, "bench_eight_bit", head, rows, about)


if __name__ == "__main__":
    main()
