"""Time the verifier on synthetic schedules of about 10,000 ops; the target is 2 s each.

python -m tools.bench_verify [--ops 10000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Iterator

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.verify import verify

TARGET_SECONDS = 2.0


def schedules(ops: int) -> Iterator[tuple[str, Program, Program]]:
    """Name, scheduled and logical program of each case, sized by the number of blocks."""
    cases = (
        ("stage 0 fp32", 0, 64, {"precision": "fp32"}),
        ("stage 1 bf16 clip", 1, 64, {"precision": "bf16", "clip": 1.0}),
        ("stage 2 fp16 clip k=4", 2, 64, {"precision": "fp16", "clip": 1.0, "micro_steps": 4}),
        ("stage 3 bf16", 3, 8, {"precision": "bf16"}),
        (
            "stage 3 fp16 clip keep_fp32",
            3,
            512,
            {"precision": "fp16", "clip": 1.0, "keep_fp32": True},
        ),
        ("stage 3 bf16 4096 ranks", 3, 4096, {"precision": "bf16"}),
    )
    for name, stage, ranks, options in cases:
        few, many = (count_ops(mlp(blocks=n, **options), stage, ranks) for n in (8, 16))
        blocks = max(1, round(8 + (ops - few) / ((many - few) / 8)))
        logical = mlp(blocks=blocks, **options)
        yield name, applied(logical, for_stage(stage, ranks)), logical


def count_ops(logical: Program, stage: int, ranks: int) -> int:
    """Ops of the scheduled program."""
    return sum(1 for _ in applied(logical, for_stage(stage, ranks)).ops())


def main() -> int:
    """Print one line a case; 1 where one misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    is_slow = False
    for name, program, logical in schedules(options.ops):
        count = sum(1 for _ in program.ops())
        seconds = []
        for reference in (None, logical):
            start = time.perf_counter()
            report = verify(program, reference)
            seconds.append(time.perf_counter() - start)
            if not report.is_valid:
                print(report.render(3))
                return 1
        is_slow |= seconds[1] > TARGET_SECONDS * max(1.0, options.ops / 10_000)
        print(
            f"{name:<28} {count:6d} ops  {seconds[0]:5.2f} s  with reference {seconds[1]:5.2f} s",
            flush=True,
        )
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(verify, program, logical)
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
