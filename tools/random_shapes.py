"""Train on batches of random sizes, on each rank and in each micro-batch its own, and compare with eager PyTorch.

    python -m tools.random_shapes [--steps 1000] [--other-steps 100] [--record docs/records/random-shapes.json]

Each training is a torchrun job over gloo with one program, whose batches have drawn sizes, the smallest and the largest
of all dims among them. A job that does not end in ``--timeout`` seconds hangs. Then as many eager replicas as ranks
train on the same batches, as for `zeroir check`, and the losses of all ranks and steps and the parameters are compared
bit by bit. After the first step, a rank counts what would compile: other programs that its engine runs, code that
Python compiles, and processes that are started. The exit code is 1 where anything was compiled, hangs or differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zeroir
from tests.support.zygote import Forked, compiling_zygote
from tools import record_file
from zeroir.api.checks.drawn_batches import batch_of_sizes, drawn_sizes
from zeroir.api.checks.reference import replicas_of
from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_with
from zeroir.api.model_of_program import load_model
from zeroir.config import make_options
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.program import Program
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.globals import torch_globals_kept

MODEL = Path(__file__).parents[1] / "examples" / "any_length.py"
RANKS, MICRO_STEPS, SEED = 4, 3, 1
TRAININGS: Mapping[str, Mapping[str, object]] = {
    "stage 3": {"stage": 3},
    "stage 3, recomputed, all offloaded": {
        "stage": 3,
        "recompute": "*",
        "offload": "optimizer,parameters,gradients",
    },
    "stage 3, recomputed, unit by unit": {"stage": 3, "recompute": "*", "order": "layer"},
}
HEAD = [
    *("training", "steps", "shapes", "compilations after the first step", "hangs"),
    *("losses that differ", "parameters that differ"),
]
_COMPILING = frozenset({"compile", "os.exec", "os.fork", "os.system", "subprocess.Popen"})
"""Audit events of Python, without which no code is generated and no compiler runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one training. ``losses`` and ``parameters`` count those that differ from eager PyTorch's.

    ``shapes`` counts the different sizes of micro-batches. A training that hangs has only ``steps``.
    """

    steps: int
    shapes: int = 0
    compiled: int = 0
    hangs: int = 0
    losses: int = 0
    parameters: int = 0

    @property
    def is_proof(self) -> bool:
        """Whether nothing was compiled, hangs or differs."""
        return not (self.compiled or self.hangs or self.losses or self.parameters)

    def cells(self, name: str) -> list[str]:
        """Return a row of the table."""
        counts = (self.steps, self.shapes, self.compiled, self.hangs, self.losses, self.parameters)
        return [name, *map("{:,}".format, counts)]


def sizes_of(program: Program, rank: int, steps: int) -> Iterator[list[Mapping[str, int]]]:
    """Yield the sizes of a rank's micro-batches for each step."""
    sizes = drawn_sizes(program, rank, SEED)
    for _ in range(steps):
        yield list(islice(sizes, MICRO_STEPS))


def batches_of(program: Program, example: Batch, rank: int, steps: int) -> Iterator[list[Batch]]:
    """Yield a rank's micro-batches for each step."""
    chance = torch.Generator().manual_seed(SEED * 1_000_003 + rank)
    for step in sizes_of(program, rank, steps):
        yield [batch_of_sizes(program, example, sizes, chance) for sizes in step]


# ------------------------------------------------------------------------------------------------------- as a rank


def note_compilations(events: list[str]) -> None:
    """From now on, append what this process compiles, and which processes it starts."""

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event in _COMPILING:
            events.append(f"{event} {arguments[:2]!r:.200}")

    sys.addaudithook(note)


def train(path: Path, steps: int) -> None:
    """Train as a rank of the job, and write losses, the parameters and what was compiled beside the program."""
    example = load_model_file(str(MODEL)).batch()
    engine = zeroir.load(path).engine(seed=SEED)
    first = program = engine.program
    losses: list[float] = []
    events: list[str] = []

    for step, batches in enumerate(batches_of(first, example, engine.rank, steps)):
        losses.append(engine.step(batches).loss)
        if engine.program is not program:
            program = engine.program
            events.append("another program")
        if step == 0:
            events.clear()
            note_compilations(events)
    compiled = list(events)
    parameters = engine.full_parameters()
    if engine.rank == 0:
        save_file(dict(parameters), path.with_suffix(".safetensors"))
    written = {"losses": losses, "compiled": compiled}
    path.with_suffix(f".{engine.rank}.json").write_text(json.dumps(written))
    engine.close()


# ------------------------------------------------------------------------------------------------ as the whole job


def outcome(
    options: Mapping[str, object], steps: int, folder: Path, timeout_s: float, ranks: int = RANKS
) -> Outcome:
    """Train with these options in processes of their own, and compare with eager replicas."""
    chosen = {"world_size": ranks, "micro_steps": MICRO_STEPS, "lr": 0.01, **options}
    compiled = compile_with(MODEL, make_options(chosen))
    path = folder / "program.zir"
    compiled.save(path)
    job = Forked(
        compiling_zygote(),
        "torch.distributed.run",
        (
            *("--standalone", "--nproc-per-node", str(ranks), "-m", "tools.random_shapes"),
            *("--rank-of", str(path), "--steps", str(steps)),
        ),
        {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        folder / "job",
    )
    code = job.wait(time.monotonic() + timeout_s)
    if code is None:
        job.send_signal(signal.SIGTERM)  # It ends its ranks.
        job.wait(time.monotonic() + timeout_s)
        return Outcome(steps=steps, hangs=1)
    if code:
        raise RuntimeError(f"the job ended with code {code}: {''.join(job.output())}")
    files = [path.with_suffix(f".{rank}.json") for rank in range(ranks)]
    written = [json.loads(file.read_text()) for file in files]
    for rank_number, each in enumerate(written):
        for event in each["compiled"]:
            print(f"rank {rank_number} compiled after the first step: {event}")
    losses, parameters = eager(compiled, steps)
    found = load_file(path.with_suffix(".safetensors"))
    assert found.keys() == parameters.keys()
    return Outcome(
        steps=steps,
        shapes=len(
            {
                tuple(sizes.values())
                for rank_number in range(ranks)
                for step in sizes_of(compiled.program, rank_number, steps)
                for sizes in step
            }
        ),
        compiled=sum(len(each["compiled"]) for each in written),
        losses=sum(
            ours != theirs
            for each, own in zip(written, losses, strict=True)
            for ours, theirs in zip(each["losses"], own, strict=True)
        ),
        parameters=sum(not torch.equal(found[name], value) for name, value in parameters.items()),
    )


def eager(compiled: CompiledProgram, steps: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return each rank's losses and the parameters of eager replicas that train on the same batches."""
    program, source = compiled.program, load_model(compiled.artifact)
    with torch_globals_kept():
        torch.set_num_threads(1)  # as many as ranks have, so that operators divide sums alike
        replicas = replicas_of(compiled.logical, source, compiled.options, seed=SEED, steps=steps)
        streams = [
            batches_of(program, source.batch(), rank, steps)
            for rank in range(program.mesh.world_size)
        ]
        losses = [replicas.step(batches) for batches in zip(*streams, strict=True)]
        return list(map(list, zip(*losses, strict=True))), replicas.parameters()


def main() -> int:
    """Train, compare and print the table; or, as a rank, train."""
    parser = record_file.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--other-steps", type=int, default=100, help="of all but the first")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of one training")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        train(arguments.rank_of, arguments.steps)
        return 0
    outcomes: dict[str, Outcome] = {}
    for name, options in TRAININGS.items():
        steps = arguments.other_steps if outcomes else arguments.steps
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = outcome(options, steps, Path(folder), arguments.timeout)
    rows = [each.cells(name) for name, each in outcomes.items()]
    about = {"ranks": RANKS, "micro_steps": MICRO_STEPS}
    record_file.publish(arguments.record, "random_shapes", HEAD, rows, about)
    return int(not all(each.is_proof for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
