"""The overhead of the engine: the time of a step outside kernels, copies and collectives, per op.

    python -m tools.bench_engine [--model examples/gpt.py] [--steps 30]

One rank runs stages 0 to 3 with the real handlers. Time inside kernels, collectives and the single torch calls of
fills, casts and the update is measured at their calls and subtracted from the step. The rest (issuing ops, allocating
and releasing buffers, signals, waits, queueing work for threads) is divided by the number of ops of a step.
``one thread`` runs every stream in the issuing thread, ``threads`` runs them as training does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

import zeroir
from tools import record_file
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.comm.local import LocalComm
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.prepared_op import PreparedOp
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.kernels.base import Kernel, Kernels
from zeroir.runtime.kernels.choice import KernelBackend, open_kernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.initial_module import Factory
from zeroir.runtime.state.initial_values import initialise
from zeroir.torch_ops.batches import Batch


@dataclass
class CallTimer:
    """Measures the seconds spent in functions that are called through it."""

    seconds: list[float] = field(default_factory=list)

    def timed(self, call: Callable[..., object]) -> Callable[..., None]:
        """The same call, its time recorded."""

        def run(*args: object) -> None:
            start = time.perf_counter()
            call(*args)
            self.seconds.append(time.perf_counter() - start)

        return run


@dataclass
class TimedKernels:
    """A kernel backend that records the time of its kernels."""

    inner: Kernels
    timer: CallTimer

    @property
    def compiles_dims(self) -> bool:
        """See ``Kernels.compiles_dims``."""
        return self.inner.compiles_dims

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """See ``Kernels.compile``."""
        return self.timer.timed(self.inner.compile(segment, bindings))

    def at(self, values: Mapping[str, int]) -> TimedKernels:
        """See ``Kernels.at``."""
        return TimedKernels(self.inner.at(values), self.timer)

    def finish(self) -> None:
        """See ``Kernels.finish``."""
        self.inner.finish()


class TimedRanks(LocalRanks):
    """Local ranks that record the time of collectives and of ops that are one torch call."""

    timer = CallTimer()

    def prepare(self, op: ops.Op, by_rank: Sequence[tuple[LocalRanks, ops.Op]] = ()) -> PreparedOp:
        """See ``LocalRanks.prepare``."""
        step = super().prepare(op, by_rank)
        match op:
            case ops.Wait() | ops.Alloc() | ops.Release() | ops.Compute():
                return step
            case _:
                return self.timer.timed(step)


def overhead(
    program: Program, factory: Factory, batch: Batch, steps: int, *, inline: bool
) -> float:
    """The engine's own seconds per op, the median over the steps."""
    timer = CallTimer()
    device = torch.device("cpu")
    memory = RankMemory(program, 0, device)
    kernels = TimedKernels(open_kernels(KernelBackend.EAGER, device), timer)
    local_ranks = TimedRanks(program=program, memories=[memory], comm=LocalComm(), kernels=kernels)
    local_ranks.timer = timer
    local_ranks.compile()
    initialise(program, [memory], factory, 0)
    names = [stream.name for stream in program.streams] if inline else ["compute"]
    executor = StepExecutor(local_ranks, ThreadStreams(inline=names))
    count = ops_of_a_step(program)
    seconds_per_op = []
    for _ in range(steps):
        timer.seconds.clear()
        start = time.perf_counter()
        executor.step([[batch]])
        seconds_per_op.append((time.perf_counter() - start - sum(timer.seconds)) / count)
    executor.close()
    return median(seconds_per_op[len(seconds_per_op) // 4 :])


def ops_of_a_step(program: Program) -> int:
    """The ops of a step of one micro-step."""
    sections = program.section_by_name
    return len(sections[LAST_MICRO_STEP].body) + len(sections[UPDATE].body)


def main() -> None:
    """Print a table of the stages."""
    parser = record_file.parser(__doc__)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model_file = load_model_file(arguments.model)
    head = ["stage", "ops a step", "one thread, µs per op", "threads, µs per op"]
    rows = []
    for stage in range(4):
        program = zeroir.compile(arguments.model, stage=stage, world_size=1).program
        cells = [
            f"{1e6 * overhead(program, model_file.model, model_file.batch(), arguments.steps, inline=inline):.1f}"
            for inline in (True, False)
        ]
        rows.append([str(stage), str(ops_of_a_step(program)), *cells])
    about = {"model": arguments.model}
    record_file.publish(arguments.record, "bench_engine", head, rows, about)


if __name__ == "__main__":
    main()
