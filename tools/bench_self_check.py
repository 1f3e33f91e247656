"""The share of the self-check in the time to the first step, at several depths of one block.

    python -m tools.bench_self_check [--depths 4 80] [--record FILE]

Equal layers share their kernels, so a deep model should be checked as fast as a shallow one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools import record_file
from tools.bench_first_step import MODEL

HEAD = ("layers", "kernels compared", "self-check, s", "to the end of the first step, s", "share")


def measure(layers: int, folder: Path) -> tuple[int, float, float]:
    """How many kernels a model of so many layers has, seconds to compare them, and seconds to the first step's end."""
    import zeroir
    from zeroir.api.run import load_model
    from zeroir.runtime.engine import Engine
    from zeroir.runtime.kernels.choice import KernelBackend
    from zeroir.runtime.self_check import check_kernels

    path = folder / f"gpt{layers}.py"
    path.write_text(MODEL.format(root=str(Path(__file__).parents[1]), layers=layers))
    compiled = zeroir.compile(path, stage=3, world_size=1)
    model_file = load_model(compiled)
    start = time.perf_counter()
    engine = Engine(compiled.program)
    opened = time.perf_counter()
    checked = check_kernels(engine._executor.local_ranks, KernelBackend.EAGER)
    done = time.perf_counter()
    engine.initialise(model_file.model, 0)
    engine.step(model_file.batch())
    whole = time.perf_counter() - start
    engine.close()
    assert not checked.skipped, checked.skipped
    return checked.compared, done - opened, whole


def main() -> int:
    """Measure, print a table, and write the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_self_check")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 80], help="numbers of layers")
    record_file.add_option(parser)
    options = parser.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in options.depths:
            count, seconds, whole = measure(layers, Path(folder))
            share = f"{seconds / whole:.0%}"
            rows.append([str(layers), str(count), f"{seconds:.2f}", f"{whole:.2f}", share])
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    record_file.write(options.record, "bench_self_check", {"head": list(HEAD), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
