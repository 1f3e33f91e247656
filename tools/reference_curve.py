"""Train the example with plain PyTorch and write its losses, for the tests to compare with.

    python -m tools.reference_curve tests/data/gpt_reference_curve.json

One process plays all the ranks: their batches, joined in rank order, make one large batch, whose
mean loss has the average of the ranks' gradients.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from examples import gpt


def train(*, ranks: int, steps: int, seed: int, learning_rate: float) -> tuple[list[float], float]:
    """Return the loss before every step, averaged over ranks, and the seconds that a step took."""
    torch.manual_seed(seed)
    model = gpt.model().apply(gpt.init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    streams = [gpt.batches(rank, ranks, seed) for rank in range(ranks)]
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        parts = [next(stream) for stream in streams]
        tokens = torch.cat([part[0] for part in parts])
        targets = torch.cat([part[1] for part in parts])
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - start) / steps


def main() -> None:
    """Train with the settings on the command line and write the curve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    losses, seconds = train(
        ranks=arguments.ranks,
        steps=arguments.steps,
        seed=arguments.seed,
        learning_rate=arguments.lr,
    )
    curve = {
        "torch": torch.__version__.partition("+")[0],
        "model": "examples/gpt.py",
        "settings": {
            "ranks": arguments.ranks,
            "seed": arguments.seed,
            "optimizer": "AdamW",
            "lr": arguments.lr,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "dtype": "float32",
        },
        "unigram_entropy": round(gpt.unigram_entropy(), 6),
        "losses": [round(loss, 6) for loss in losses],
    }
    output: Path = arguments.output
    output.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    print(f"{output}: {len(losses)} steps, {seconds:.3f} s each, last loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
