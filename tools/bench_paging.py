"""Count the traffic of a paged optimizer beside rules of replacement: ``python -m tools.bench_paging [--record FILE]``.

The program is ``examples/gpt.py`` with AdamW on one device. The traffic of the pass is what its transfers move. The
rules see the same pages in the same order, in a memory as large as what the pass gets (``device_bytes``). *Unified
memory* is demand paging as other paged optimizers have it: the driver moves blocks of each state's own allocation, here
as large as a page (2 MiB on CUDA), and the one whose use is longest ago leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.pipelines import for_stage
from tools import record_file
from tools.page_replacement import Page, Rule, belady, lru
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.program import Program
from zeroir.passes.manager import run as run_passes
from zeroir.passes.offload.page_optimizer import PageOptimizer

MODEL: Final = Path(__file__).parents[1] / "examples" / "gpt.py"
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
PAGE_BYTES: Final = 2**18
"""As many pages of the small model as a model of 1 billion parameters has pages of 2 MiB on 4 ranks, about."""
STEPS: Final = 50
"""The steps over which traffic is averaged."""


class Traffic(NamedTuple):
    """The bytes that come in a step."""

    lru: float
    unified: float
    belady: float
    planned: int


def page_bytes_by_page(program: Program, page_bytes: int) -> Mapping[Page, int]:
    """The pages of all states of the program, in the order in which an update uses them, with their bytes."""
    pages: dict[Page, int] = {}
    for op in program.ops():
        if isinstance(op, ops.OptimizerStep) and op.states:
            numel = program.buffer_by_name[op.states[0].buffer].numel
            element_bytes = 4 * len(op.states)
            most = page_bytes // (256 * element_bytes)
            count = -(-numel // (256 * most))
            page_numel = -(-numel // (256 * count)) * 256
            for start in range(0, numel, page_numel):
                size_bytes = element_bytes * min(page_numel, numel - start)
                pages[op.states[0].buffer, start] = size_bytes
    return pages


def blocks(program: Program, block_bytes: int) -> Mapping[Page, int]:
    """The blocks of each state's allocation in the order in which an update touches them, with their bytes."""
    sizes: dict[Page, int] = {}
    for op in program.ops():
        if isinstance(op, ops.OptimizerStep) and op.states:
            size_bytes = program.buffer_by_name[op.states[0].buffer].size_bytes
            for start in range(0, size_bytes, block_bytes):
                for state in op.states:
                    sizes[state.buffer, start] = min(block_bytes, size_bytes - start)
    return sizes


def bytes_in(rule: Rule, sizes: Mapping[Page, int], frames: int) -> float:
    """The bytes that come in a step, on average over the steps after the first."""
    pages = list(sizes)
    first = sum(sizes[page] for page in rule(pages, frames).came_in)
    total = sum(sizes[page] for page in rule(pages * STEPS, frames).came_in)
    return (total - first) / (STEPS - 1)


def planned_bytes(program: Program) -> tuple[int, int]:
    """The bytes that the pages of a paged program bring in, and take out, in a step."""
    pages = {buffer.name for buffer in program.buffers if buffer.role is Role.PAGE}
    moved = {ops.ToDevice: 0, ops.ToHost: 0}
    for op in program.step_ops():
        match op:
            case ops.ToDevice() if op.destination.buffer in pages:
                moved[ops.ToDevice] += op.source.local_numel(program.mesh) * 4
            case ops.ToHost() if op.source.buffer in pages:
                moved[ops.ToHost] += op.source.local_numel(program.mesh) * 4
            case _:
                pass
    return moved[ops.ToDevice], moved[ops.ToHost]


def traffic(logical: Program, device_bytes: int, page_bytes: int) -> Traffic:
    """The traffic of each rule, and of the pass, with that much device memory for states."""
    passes = for_stage(0, 1)
    sizes = page_bytes_by_page(run_passes(logical, passes), page_bytes)
    sizes_of_blocks = blocks(run_passes(logical, passes), page_bytes)
    paged = run_passes(
        logical, (*passes, PageOptimizer(device_bytes=device_bytes, page_bytes=page_bytes))
    )
    incoming, outgoing = planned_bytes(paged)
    assert incoming == outgoing
    frames = device_bytes // page_bytes
    return Traffic(
        lru=bytes_in(lru, sizes, frames),
        unified=bytes_in(lru, sizes_of_blocks, frames),
        belady=bytes_in(belady, sizes, frames),
        planned=incoming,
    )


def state_bytes(program: Program) -> int:
    """The bytes of the optimizer's states on one rank."""
    states = (b for b in program.buffers if b.role is Role.STATE and b.space is Space.DEVICE)
    return sum(buffer.size_bytes for buffer in states)


def main() -> int:
    """Measure, print and record."""
    arguments = record_file.parser(__doc__ or "").parse_args()
    logical = compile_with(str(MODEL), make_options({"stage": 0, "world_size": 1})).logical
    whole_bytes = state_bytes(logical)
    rows: list[list[str]] = []
    for share in SHARES:
        device_bytes = int(share * whole_bytes) // PAGE_BYTES * PAGE_BYTES
        moved = traffic(logical, device_bytes, PAGE_BYTES)
        rows.append(
            [
                f"{share:.0%}",
                f"{device_bytes // PAGE_BYTES}",
                *(f"{size_bytes / whole_bytes:.1%}" for size_bytes in moved),
            ]
        )
    head = [
        "states on the device",
        "pages there",
        "LRU",
        "unified memory",
        "Belady",
        "`page-optimizer`",
    ]
    about = {"state_bytes": whole_bytes, "page_bytes": PAGE_BYTES}
    record_file.publish(arguments.record, "bench_paging", head, rows, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
