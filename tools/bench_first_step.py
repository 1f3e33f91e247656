"""The time of the first step with compiled kernels and an empty cache, at several depths of one block.

    python -m tools.bench_first_step [--depths 2 32] [--record FILE]

Equal layers share their kernels, so a deep model should wait for the compiler no longer than a shallow one. Every
depth runs in a process of its own with a cache of its own: once cold, once warm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools import record_file

MODEL = """
import sys
sys.path.insert(0, {root!r})
from tools.peers import gpt

gpt.LAYERS = {layers}
model, batch, batches = gpt.model, gpt.batch, gpt.batches
"""


def model_file(layers: int, folder: Path) -> Path:
    """Write a model file of the comparison's GPT with so many layers."""
    path = folder / f"gpt{layers}.py"
    path.write_text(MODEL.format(root=str(Path(__file__).parents[1]), layers=layers))
    return path


def first_step_seconds(path: Path) -> float:
    """Seconds from a compiled program to the end of its first step, in this process."""
    import zeroir
    from zeroir.api.model_of_program import load_model
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.opened_program import EngineSettings
    from zeroir.runtime.kernels.choice import KernelBackend

    compiled = zeroir.load(path)
    model = load_model(compiled.artifact, compiled.path)
    start = time.perf_counter()
    engine = Engine(compiled.program, EngineSettings(kernels=KernelBackend.INDUCTOR))
    engine.initialise(model.model, 0)
    engine.step(model.batch())
    return time.perf_counter() - start


def measure(layers: int, folder: Path) -> tuple[float, float, float]:
    """Seconds of the first step with an empty cache, with a full one, and how much longer the former takes."""
    import zeroir

    path = folder / f"{layers}.zir"
    zeroir.compile(model_file(layers, folder), stage=3, world_size=1).save(path)
    environment = os.environ | {"ZEROIR_CACHE_DIR": str(folder / f"cache{layers}")}
    command = [sys.executable, "-m", "tools.bench_first_step", "--program", str(path)]
    cold, warm = (
        float(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(2)
    )
    return cold, warm, cold - warm


def main() -> int:
    """Print a table of the depths and the ratio of the last to the first."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program is not None:
        print(first_step_seconds(arguments.program))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        by_depth = {layers: measure(layers, Path(folder)) for layers in arguments.depths}
    few, many = by_depth[arguments.depths[0]], by_depth[arguments.depths[-1]]
    head = [
        "layers",
        "first step with an empty cache, s",
        "with a full one, s",
        "of the first for the compiler, s",
    ]
    rows = [[str(layers), *(f"{s:.1f}" for s in seconds)] for layers, seconds in by_depth.items()]
    ratios = (f"{b / a:.2f}" for a, b in zip(few, many, strict=True))
    rows.append(["ratio of the last to the first", *ratios])
    record_file.publish(arguments.record, "bench_first_step", head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
