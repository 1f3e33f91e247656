"""Time a training step of ZeRO stages 0 to 3 against each other, in one run over gloo.

    python -m tools.bench_stages [--world-size 2] [--rounds 15] [--steps 4]

All stages live in the same processes. Every round times each of them once, in an order that changes from round to
round, and ratios are taken within a round, so that what else the machine does hits all alike. Stage 0 is there twice:
how far its two copies are apart is the noise that a difference must exceed to mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import zeroir
from zeroir.frontend.entry import load_model_file
from zeroir.runtime.engine import Engine

NAMES = ("stage 0", "stage 0 again", "stage 1", "stage 2", "stage 3")
STAGES = (0, 0, 1, 2, 3)


def measure(model: str, precision: str, rounds: int, steps: int) -> list[list[float]]:
    """Seconds a step of every entry of ``NAMES``, by round; every rank calls this alike."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model_file = load_model_file(model)
    assert model_file.batches is not None
    batches = model_file.batches(rank, world_size, 0, 0)
    engines = []
    for stage in STAGES:
        compiled = zeroir.compile(model, stage=stage, world_size=world_size, precision=precision)
        engine = Engine(compiled.program)
        engine.initialise(model_file.model, 0)
        engines.append(engine)
    found: list[list[float]] = []
    for number in range(rounds + 1):  # the first warms up
        seconds = [0.0] * len(engines)
        for turn in range(len(engines)):
            at = (turn + number) % len(engines)
            of_round = [next(batches) for _ in range(steps)]
            dist.barrier()
            start = time.perf_counter()
            for batch in of_round:
                engines[at].step(batch)
            seconds[at] = (time.perf_counter() - start) / steps
        if number > 0:
            found.append(seconds)
    for engine in engines:
        engine.close()
    return found


def worker(folder: Path, arguments: argparse.Namespace) -> None:
    """One rank; rank 0 writes what it measured."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout=timedelta(seconds=120),
    )
    found = measure(arguments.model, arguments.precision, arguments.rounds, arguments.steps)
    if arguments.rank == 0:
        (folder / "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def report(found: list[list[float]]) -> str:
    """A line per stage: median milliseconds, and the median and middle half of its ratio to stage 0."""
    lines = []
    for at, name in enumerate(NAMES):
        ratios = sorted(seconds[at] / seconds[0] for seconds in found)
        quarter = len(ratios) // 4
        milliseconds = 1000 * median(seconds[at] for seconds in found)
        lines.append(
            f"{name:<14} {milliseconds:7.1f} ms/step  x {median(ratios):.3f}"
            f"  (middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
        )
    noise = [abs(seconds[1] / seconds[0] - 1) for seconds in found]
    lines.append(f"noise floor: the two copies of stage 0 differ by {median(noise):.1%} (median)")
    return "\n".join(lines)


def main() -> int:
    """Start the ranks and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank is not None:
        worker(arguments.folder, arguments)
        return 0
    with tempfile.TemporaryDirectory() as name:
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tools.bench_stages", *sys.argv[1:], "--folder", name]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment)
            for rank in range(arguments.world_size)
        ]
        code = max(rank.wait() for rank in ranks)
        if code == 0:
            print(report(json.loads((Path(name) / "seconds.json").read_text())))
    return code


if __name__ == "__main__":
    sys.exit(main())
