"""How fast and how tightly temporary buffers are placed: ``python -m tools.bench_placement [--buffers 100000]``.

Two kinds of programs: *layers* is a deep network at stage 3, whose every layer gathers its parameters twice, saves
values for the backward and needs values in passing; *random* are buffers of all sizes that live for a random time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, Program, Section
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.placement import place_all
from zeroir.passes.plan_memory import PlanMemory

SAVED = 24
PASSING = 70
PER_LAYER = SAVED + PASSING + 2
TARGET_S = 5.0
"""The processor seconds that ``plan-memory`` may take for 100,000 buffers."""


@dataclass(slots=True)
class ProgramBuilder:
    """Collects buffers and ops."""

    buffers: list[Buffer] = field(default_factory=list)
    body: list[Op] = field(default_factory=list)

    def buffer(self, numel: int, role: Role = Role.ACTIVATION) -> str:
        """A new temporary buffer."""
        name = f"b{len(self.buffers)}"
        self.buffers.append(
            Buffer(name=name, dtype=DType.F32, numel=numel, space=Space.DEVICE, role=role)
        )
        return name

    def alloc(self, name: str, stream: str = "compute") -> None:
        """Begin a buffer."""
        self.body.append(ops.Alloc(buffer=name, stream=stream))

    def fill(self, name: str, stream: str = "compute", event: str | None = None) -> None:
        """Use a buffer."""
        region = Region(buffer=name, offset=0, numel=1)
        self.body.append(ops.Fill(destination=region, value=0.0, stream=stream, event=event))

    def release(self, name: str, stream: str = "compute", event: str | None = None) -> None:
        """End a buffer."""
        self.body.append(ops.Release(buffer=name, stream=stream, event=event))

    def wait(self, event: str, stream: str) -> None:
        """Order a stream after an event."""
        self.body.append(ops.Wait(waited=event, on=stream))

    def program(self) -> Program:
        """The program of one section."""
        section = Section(name=LAST_MICRO_STEP, body=tuple(self.body))
        return Program(
            mesh=Mesh(axes=(Axis(name="dp", size=2),)),
            buffers=tuple(self.buffers),
            sections=(section,),
        )


def layers(count: int, seed: int) -> Program:
    """A deep network at stage 3 with about so many temporary buffers."""
    make, chance = ProgramBuilder(), random.Random(seed)
    number = max(count // PER_LAYER, 1)
    saved_numels = [chance.randrange(1, 64) * 1024 for _ in range(SAVED)]
    passing_numels = [chance.randrange(1, 64) * 1024 for _ in range(PASSING)]
    full = [make.buffer(1_000_000, Role.GATHERED) for _ in range(number)]
    saved = [[make.buffer(n, Role.SAVED) for n in saved_numels] for _ in range(number)]
    before: list[str] = []

    def run(layer: int, name: str, values: Callable[[], Iterator[None]]) -> None:
        if len(before) >= 2:
            # One layer is gathered ahead; and the last one's second life begins after its first.
            make.wait(before[-1 if before[-1] == f"f{layer}.done" else -2], "gather")
        make.alloc(full[layer], "gather")
        make.fill(full[layer], "gather", f"{name}.gathered")
        make.wait(f"{name}.gathered", "compute")
        for _ in values():
            pass
        make.release(full[layer], event=f"{name}.done")
        before.append(f"{name}.done")

    def passing(numels: list[int]) -> None:
        live: list[str] = []
        for numel in numels:
            live.append(make.buffer(numel))
            make.alloc(live[-1])
            make.fill(live[-1])
            if len(live) > chance.randrange(2, 5):
                make.release(live.pop(0))
        for name in live:
            make.release(name)

    def forward(layer: int) -> Iterator[None]:
        passing(passing_numels[: PASSING // 2])
        for name in saved[layer]:
            make.alloc(name)
            make.fill(name)
            yield

    def backward(layer: int) -> Iterator[None]:
        grad = make.buffer(1_000_000, Role.GRAD)
        make.alloc(grad)
        passing(passing_numels[PASSING // 2 :])
        for name in reversed(saved[layer]):
            make.release(name)
            yield
        make.release(grad)

    for layer in range(number):
        run(layer, f"f{layer}", lambda layer=layer: forward(layer))  # type: ignore[misc]
    for layer in reversed(range(number)):
        run(layer, f"b{layer}", lambda layer=layer: backward(layer))  # type: ignore[misc]
    return make.program()


def scattered(count: int, seed: int) -> Program:
    """Buffers of all sizes, some ten of which live at once."""
    make, chance = ProgramBuilder(), random.Random(seed)
    live: list[str] = []
    for _ in range(count):
        name = make.buffer(chance.randrange(1, 1 << chance.randrange(8, 20)))
        make.alloc(name)
        make.fill(name)
        live.append(name)
        while live and (len(live) > 20 or chance.random() < 0.45):
            make.release(live.pop(chance.randrange(len(live))))
    for name in live:
        make.release(name)
    return make.program()


def main() -> int:
    """Print a line for each kind of program; 1 where one misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--buffers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    is_slow = False
    for name, make in (("layers", layers), ("random", scattered)):
        program = make(arguments.buffers, arguments.seed)
        start = time.process_time()
        lives = len(Lifetimes.of(program).buffers)
        swept = time.process_time()
        placement = place_all(program)[Space.DEVICE]
        placed = time.process_time()
        PlanMemory()(program)
        stop = time.process_time()
        is_slow |= stop - placed > TARGET_S * max(1.0, arguments.buffers / 100_000)
        print(
            f"{name:8} {len(program.buffers):,} buffers, {lives:,} lives, {len(program.sections[0].body):,} ops: "
            f"plan-memory takes {stop - placed:.2f} s of CPU time (places alone {placed - swept:.2f} s, of these "
            f"lifetimes {swept - start:.2f} s), "
            f"{placement.size_bytes:,} bytes, {placement.live_bytes:,} live at once, gap {placement.gap:.2%}"
        )
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
