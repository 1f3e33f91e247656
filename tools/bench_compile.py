"""Time the compiler at several depths of one block, and the memory that it takes.

    python -m tools.bench_compile [--model tests/support/models/deep_llama.py] [--depths 8 32 80]
                                  [--world-size 512] [--stage 3] [--precision bf16] [--shapes SHAPES]

The model file has a factory ``layers_N`` for each depth N. The first table times the commands as a user starts them,
each in a process of its own: wall-clock and processor seconds, and the peak of resident memory; a compilation for any
shape stands beside that for one, with the ratio of their processor times. The second says
where the time of a compilation goes. The last column is the law: how much longer the deepest takes than the shallowest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tools import record_file

MODEL = "tests/support/models/deep_llama.py"
SHAPES = "input_ids: batch<=8, 2<=length<=2048; labels: batch, length"
ONE_SHAPE, ANY_SHAPE = "compile", "compile for any shape"


@dataclass(frozen=True, slots=True)
class CommandCost:
    """The time and memory that a process took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def timed(command: Sequence[str]) -> CommandCost:
    """Run a command to its end; CalledProcessError where it fails."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        environment = os.environ | {"ZEROIR_KEEP_PROGRAMS": "off"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            print(log.read().decode(), file=sys.stderr)
            raise subprocess.CalledProcessError(process.returncode, command)
    return CommandCost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def commands(arguments: argparse.Namespace, depth: int, path: str) -> dict[str, list[str]]:
    """The command lines to time, by name."""
    zeroir = [sys.executable, "-m", "zeroir"]
    compile_one = [
        *zeroir, "compile", f"{arguments.model}:layers_{depth}", "-o", path,
        "--stage", str(arguments.stage), "--world-size", str(arguments.world_size),
        "--precision", arguments.precision,
    ]  # fmt: skip
    return {
        ANY_SHAPE: [*compile_one, "--shapes", arguments.shapes],
        ONE_SHAPE: compile_one,
        "verify": [*zeroir, "verify", path],
        "show": [*zeroir, "show", path],
    }


def phases(arguments: argparse.Namespace, depth: int) -> dict[str, float]:
    """The phases of a compilation in this process, in processor seconds, which other processes affect little."""
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.process_time()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - start

    with phase("import zeroir, torch"):
        import zeroir
        from zeroir import artifact
        from zeroir.config import make_options
        from zeroir.frontend.capture.capture import capture
        from zeroir.frontend.lowering.tracing import program_of
        from zeroir.frontend.source.entry import load_model_file
        from zeroir.ir.text import print_program
        from zeroir.passes.manager import apply
        from zeroir.passes.pipelines import for_options
        from zeroir.verify import check, verify
    options = make_options(
        {name: getattr(arguments, name) for name in ("stage", "world_size", "precision")}
    )
    with phase("import the model file"):
        model_file = load_model_file(f"{arguments.model}:layers_{depth}")
    with phase("capture"):
        captured = capture(model_file, options.precision.dtype, options.precision.keep_fp32)
    with phase("cut and lower"):
        logical = replace(program_of(captured, options), options=options)
    with phase("verify after passes"):
        check(logical, reference=logical)
    program = logical
    for step in for_options(options):
        with phase("passes"):
            program = apply(step, program)
        with phase("verify after passes"):
            check(program, reference=logical)
    with phase("verify the artefact"):
        verify(program, reference=logical)
    import torch

    compiled = artifact.Artifact(
        logical=logical,
        scheduled=program,
        model_path=arguments.model,
        model_factory=f"layers_{depth}",
        model_sha256="0" * 64,
        torch_version=torch.__version__,
        zeroir_version=zeroir.__version__,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.zir"
        with phase("write"):
            artifact.save(compiled, path)
        with phase("(read it)"):
            artifact.load(path)
    with phase("(print it)"):
        print_program(program)
    return seconds


def phases_apart(depth: int) -> dict[str, float]:
    """The phases, measured by this tool in a process of its own."""
    tool = [sys.executable, "-m", "tools.bench_compile"]
    command = [*tool, *sys.argv[1:], "--phases-of", str(depth)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> int:
    """Print the tables and the ratio."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 32, 80])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=512)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--shapes", default=SHAPES, help="those of a compilation for any shape")
    parser.add_argument("--phases-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phases_of is not None:
        print(json.dumps(phases(arguments, arguments.phases_of)))
        return 0
    depths: list[int] = sorted(arguments.depths)
    columns = [f"{depth} layers" for depth in depths]
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[int, dict[str, CommandCost]] = {depth: {} for depth in depths}
        for depth in depths:
            for name, command in commands(arguments, depth, f"{folder}/{depth}.zir").items():
                runs[depth][name] = timed(command)
                print(f"{depth} layers: {name} {_cell(runs[depth][name])}", file=sys.stderr)
        sizes = [f"{Path(folder, f'{depth}.zir').stat().st_size / 1e6:.2f} MB" for depth in depths]
    rows = [
        [
            name,
            *(_cell(runs[depth][name]) for depth in depths),
            _ratio(runs[depths[-1]][name], runs[depths[0]][name]),
        ]
        for name in runs[depths[0]]
    ]
    ratios = [
        f"{runs[depth][ANY_SHAPE].cpu_seconds / runs[depth][ONE_SHAPE].cpu_seconds:.2f}"
        for depth in depths
    ]
    rows.append(["any shape / one shape, cpu", *ratios, ""])
    rows.append(["artefact", *sizes, ""])
    head = ["wall s / cpu s / peak", *columns, f"{columns[-1]} / {columns[0]}: wall, cpu"]
    record_file.publish(arguments.record, "bench_compile", head, rows)
    parts = [phases_apart(depth) for depth in depths]
    inside = [[name, *(f"{part[name]:.2f}" for part in parts)] for name in parts[0]]
    record_file.print_table(["cpu s of a compilation", *columns], inside)
    return 0


def _ratio(many: CommandCost, few: CommandCost) -> str:
    return f"{many.wall_seconds / few.wall_seconds:.1f}, {many.cpu_seconds / few.cpu_seconds:.1f}"


def _cell(run: CommandCost) -> str:
    return f"{run.wall_seconds:.1f} / {run.cpu_seconds:.1f} / {run.peak_bytes / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
