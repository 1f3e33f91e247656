"""Time the compiler on a model file at every ZeRO stage, and the memory that it takes.

python -m tools.bench_compile [--model examples/gpt.py] [--world-size 2] [--precision fp32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
from statistics import median

from zeroir.config import make_options
from zeroir.frontend import load_model_file, trace
from zeroir.ir.verify import verify
from zeroir.passes.pipelines import lower


def main() -> int:
    """Print one line a stage: median seconds to trace, to lower (verifying after every pass) and to verify."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model_file = load_model_file(arguments.model)
    numel = 0
    for stage in range(4):
        values = {
            "stage": stage,
            "world_size": arguments.world_size,
            "precision": arguments.precision,
        }
        options = make_options(values)
        seconds: list[tuple[float, ...]] = []
        count = 0
        for _ in range(arguments.rounds):
            times = [time.perf_counter()]
            logical = trace(model_file, options)
            times.append(time.perf_counter())
            program = lower(logical, options)
            times.append(time.perf_counter())
            verify(program, reference=logical)
            times.append(time.perf_counter())
            seconds.append(tuple(b - a for a, b in itertools.pairwise(times)))
            count, numel = sum(1 for _ in program.ops()), logical.parameters_numel
        tracing, lowering, verifying = (median(column) for column in zip(*seconds, strict=True))
        print(
            f"stage {stage}: {count:5d} ops  trace {tracing:.2f} s  lower {lowering:.2f} s"
            f"  verify {verifying:.2f} s",
            flush=True,
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{numel:,} parameters, peak memory of the process {peak_bytes / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
