"""Compare steps of a program for any shape with those of one for the example's shape, at that shape.

    python -m tools.bench_shapes [--steps 200] [--record FILE]

Both programs are in one process and take turns, so that other work on the machine slows both down. The figures are
medians of the processor time of a step on one thread, and the ratio is the median of those of pairs of steps. Both take
the mean over batches: by default a program for any shape weighs batches by their numbers of labels, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM

import zeroir
from examples import any_length
from tools import record_file

Tokens = dict[str, Tensor]
BATCHES = zeroir.MicroSteps(mean_over="batches")
WARM_STEPS = 5
VOCABULARY = 512
HEAD = ["model", "batch", "one shape, ms", "any shape, ms", "more, ms", "ratio"]


class Case(NamedTuple):
    """A model and its batch of the example's shape."""

    name: str
    make: Callable[[], nn.Module]
    batch: Tokens


def llama(width: int, layers: int) -> nn.Module:
    """A Llama with grouped heads."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def tokens(rows: int, length: int) -> Tokens:
    """A batch of random tokens without padding."""
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def cases() -> list[Case]:
    """The models, from one whose step is mostly Python to one that computes."""
    return [
        Case("examples/any_length.py", any_length.model, any_length.batch()),
        Case("Llama, 4 layers of width 64", lambda: llama(64, 4), tokens(4, 32)),
        Case("Llama, 4 layers of width 256", lambda: llama(256, 4), tokens(4, 128)),
    ]


def loss(module: nn.Module, batch: Tokens) -> Tensor:
    """The loss of both kinds of models."""
    output = module(**batch)
    found: Tensor = output[0] if isinstance(output, tuple) else output.loss
    return found


def measured(case: Case, steps: int) -> list[str]:
    """The row of a model."""
    rows, length = case.batch["input_ids"].shape
    dims = Dim("rows", max=2 * rows), Dim("length", min=2, max=2 * length)
    engines = []
    for shapes in (None, dict.fromkeys(case.batch, dims)):
        torch.manual_seed(0)
        compiled = zeroir.compile(
            case.make(), case.batch, loss=loss, stage=3, shapes=shapes, micro_steps=BATCHES
        )
        engines.append(compiled.engine())
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(WARM_STEPS + steps):
        for place in (0, 1) if step % 2 else (1, 0):
            start = time.process_time()
            engines[place].step(case.batch)
            if step >= WARM_STEPS:
                seconds[place].append(time.process_time() - start)
    for engine in engines:
        engine.close()
    one, several = (median(each) * 1e3 for each in seconds)
    ratio = median(b / a for a, b in zip(*seconds, strict=True))
    size = f"{rows} × {length}"
    return [case.name, size, f"{one:.2f}", f"{several:.2f}", f"{several - one:.2f}", f"{ratio:.2f}"]


def main() -> int:
    """Print the table."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(case, arguments.steps) for case in cases()]
    record_file.publish(arguments.record, "bench_shapes", HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
