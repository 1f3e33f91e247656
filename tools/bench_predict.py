"""Predicted against measured step times: four models at stages 0 to 3 on two ranks, in rounds that take turns.

    python -m tools.bench_predict [--rounds 3] [--steps 20] [--models examples/gpt.py …] [--record FILE]

In every round each program is profiled (`zeroir profile`): a job takes, in turns, steps that are timed and steps that
are recorded, from which the time of a step is predicted. A second job, which only trains, shows the difference
between two jobs. The table has medians over rounds; the noise floor is the difference between odd and even rounds of
one job. Nothing else should run on the machine. The exit code is 1 where a median error exceeds 15 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median

import zeroir
from tools import record_file

HEAD = [
    *("model", "stage", "measured, ms", "predicted, ms"),
    *("error", "noise floor", "another job, ms"),
]
MODELS = (
    "examples/gpt.py",
    "tests/support/models/llama.py",
    "tests/support/models/convnet.py",
    "tests/support/models/gpt2.py",
)
STAGES = (0, 1, 2, 3)
RANKS = 2
WARM_UP = 3
MOST_ERROR = 0.15
"""The allowed error of a prediction, as a fraction of the measured step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Seconds of a step of one program in one round: measured, predicted, and measured by another job."""

    model: str
    stage: int
    measured_s: float
    predicted_s: float
    other_s: float
    noise: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a fraction of the measured step."""
        return self.predicted_s / self.measured_s - 1


def main() -> int:
    """Compile, profile and train in rounds, and print the table; or, as a rank, time the steps of one program."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, default=list(STAGES))
    parser.add_argument("--kernels", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        time_steps(arguments.rank_of, arguments.steps, arguments.kernels)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(
            Path(folder),
            arguments.models,
            arguments.stages,
            arguments.rounds,
            arguments.steps,
            arguments.kernels,
        )
    programs: dict[tuple[str, int], list[RoundTimes]] = {}
    for times in rounds:
        programs.setdefault((times.model, times.stage), []).append(times)
    table = [cells(times) for times in programs.values()]
    about = {"rounds": arguments.rounds, "kernels": arguments.kernels}
    record_file.publish(arguments.record, "bench_predict", HEAD, table, about)
    return int(any(abs(median_error(times)) > MOST_ERROR for times in programs.values()))


def measure(
    folder: Path, models: list[str], stages: list[int], rounds: int, steps: int, kernels: str
) -> list[RoundTimes]:
    """Every program in every round."""
    programs = {
        (model, stage): folder / f"{number}_{stage}.zir"
        for number, model in enumerate(models)
        for stage in stages
    }
    for (model, stage), path in programs.items():
        zeroir.compile(model, stage=stage, world_size=RANKS).save(path)
    results: list[RoundTimes] = []
    for number, ((model, stage), path) in itertools.product(range(rounds), programs.items()):
        machine = folder / f"{path.stem}.toml"
        profile = ["-m", "zeroir", "profile", str(path), "--output", str(machine)]
        told = start([*profile, "--rounds", str(steps), "--kernels", kernels, "--json"])
        profiled = json.loads(told)
        timed = ["-m", "tools.bench_predict", "--rank-of", str(path)]
        timed += ["--steps", str(steps), "--kernels", kernels]
        results.append(
            RoundTimes(
                model=model,
                stage=stage,
                measured_s=profiled["step_seconds"],
                predicted_s=zeroir.simulate(path, machine).step_s,
                other_s=float(start(timed)),
                noise=nan if profiled["noise"] is None else profiled["noise"],
            )
        )
        latest = results[-1]
        print(
            f"round {number + 1}: {model} at stage {stage}: {latest.measured_s * 1e3:.2f} ms, "
            f"predicted {latest.predicted_s * 1e3:.2f} ms ({latest.error:+.1%})",
            file=sys.stderr,
        )
    return results


def start(arguments: list[str]) -> str:
    """The output of a torchrun job that runs a module."""
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(RANKS), *arguments),
        ],
        env=os.environ | {"OMP_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return result.stdout


def time_steps(path: Path, steps: int, kernels: str) -> None:
    """As a rank: the median of the seconds of a step, printed by rank 0."""
    from zeroir.api.model_of_program import load_model
    from zeroir.api.running.engines import kernel_backend, open_data
    from zeroir.runtime.distributed import rendezvous
    from zeroir.runtime.engine.opened_program import EngineSettings

    compiled = zeroir.load(path)
    place = rendezvous.join_job()
    model_file = load_model(compiled.artifact, compiled.path)
    engine = compiled.open_engine(
        model_file, place, EngineSettings(kernels=kernel_backend(kernels))
    )
    data = open_data(model_file, place, 0)
    seconds: list[float] = []
    for step in range(WARM_UP + steps):
        batch = data.take(step + 1)
        engine.finish()
        begin = time.perf_counter()
        engine.step(batch)
        engine.finish()
        seconds.append(time.perf_counter() - begin)
    engine.close()
    rendezvous.leave_job()
    if place.rank == 0:
        print(median(seconds[WARM_UP:]))


def median_error(rounds: list[RoundTimes]) -> float:
    """The median error of one program's rounds."""
    return median(times.error for times in rounds)


def cells(rounds: list[RoundTimes]) -> list[str]:
    """A row of the table: the medians of one program's rounds."""
    measured, predicted, other = (
        f"{1e3 * median(seconds):.1f}"
        for seconds in zip(
            *((times.measured_s, times.predicted_s, times.other_s) for times in rounds), strict=True
        )
    )
    error, noise = f"{median_error(rounds):+.1%}", f"{median(times.noise for times in rounds):.1%}"
    first = rounds[0]
    return [Path(first.model).stem, str(first.stage), measured, predicted, error, noise, other]


if __name__ == "__main__":
    sys.exit(main())
