"""The share of the self-check in the time to the first step, at several depths of one block.

    python -m tools.bench_self_check [--depths 4 80] [--record FILE]

Equal layers share their kernels, so a deep model should be checked as fast as a shallow one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tools import record_file
from tools.bench_first_step import model_file

HEAD = ("layers", "kernels compared", "self-check, s", "to the end of the first step, s", "share")


def measure(layers: int, folder: Path) -> tuple[int, float, float]:
    """The number of kernels of a model with ``layers`` layers, the seconds to compare them and to end a first step."""
    import zeroir
    from zeroir.api.model_of_program import load_model
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.kernels.choice import KernelBackend
    from zeroir.runtime.kernels.self_check import check_kernels

    compiled = zeroir.compile(model_file(layers, folder), stage=3, world_size=1)
    model = load_model(compiled.artifact, compiled.path)
    start = time.perf_counter()
    engine = Engine(compiled.program)
    opened = time.perf_counter()
    checked = check_kernels(engine.rank_program.executor.local_ranks, KernelBackend.EAGER)
    done = time.perf_counter()
    engine.initialise(model.model, 0)
    engine.step(model.batch())
    whole = time.perf_counter() - start
    engine.close()
    assert not checked.skipped, checked.skipped
    return checked.compared, done - opened, whole


def main() -> int:
    """Measure, print a table, and write the record."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 80], help="numbers of layers")
    options = parser.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in options.depths:
            count, seconds, whole = measure(layers, Path(folder))
            share = f"{seconds / whole:.0%}"
            rows.append([str(layers), str(count), f"{seconds:.2f}", f"{whole:.2f}", share])
    record_file.publish(options.record, "bench_self_check", HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
