"""Simulated steps of models whose training state exceeds the memory of their devices, for `tools.bench_offload`.

Nothing is allocated or run: a model is captured on the meta device, its program is compiled and proved, and the step is
simulated. So is the step of the same program without offloading, as if the device had memory for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zeroir
from tools import offload_models
from zeroir.api import CompiledProgram
from zeroir.cost.machine import Machine, load_machine
from zeroir.cost.simulate import Simulation
from zeroir.ir.buffers import Space
from zeroir.memory.footprint import footprint
from zeroir.memory.states import snapshot_bytes
from zeroir.report.names import format_bytes

PAPERS = Path(__file__).parents[1] / "tests" / "data" / "offload_papers.json"
HEAD = [
    *("model", "on", "offloaded", "batch", "micro-steps", "device", "host", "disk"),
    *("step, s", "TFLOP/s per GPU", "speed kept"),
]
PUBLISHED_HEAD = ["system", "result", "published TFLOP/s per GPU", "ours, simulated", "source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training to simulate: a model, sequences of a rank's micro-batch, a machine, and options of the compiler."""

    model: str
    batch: int
    machine: str
    ranks: int
    micro_steps: int = 1
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def offloaded(self) -> str:
        """What is offloaded, as the command line says it."""
        words = [str(self.options["offload"])] if "offload" in self.options else []
        words += [
            f"--{name.replace('_', '-')} {self.options[name]}"
            for name in ("offload_to", "offload_fraction", "optimizer_bits", "page_optimizer")
            if name in self.options
        ]
        return " ".join(words) or "nothing"


_RECOMPUTED: Mapping[str, object] = {"precision": "bf16", "recompute": "*"}
_PUBLISHED: Mapping[str, object] = {"precision": "fp16", "recompute": "*", "stage": 2}

_EIGHT_BITS: Mapping[str, object] = {"offload": "optimizer,gradients", "optimizer_bits": 8}

SCENARIOS: Sequence[Scenario] = (
    Scenario(
        model="gpt_10b",
        batch=10,
        machine="dgx-2",
        ranks=1,
        options={**_PUBLISHED, "offload": "optimizer,gradients"},
    ),
    *(
        Scenario(
            model="llama_13b",
            batch=batch,
            machine="1xh100-pcie",
            ranks=1,
            micro_steps=micro_steps,
            options={**_RECOMPUTED, "stage": 2, **offloaded},
        )
        for batch, micro_steps, offloaded in (
            (4, 1, _EIGHT_BITS),
            (8, 1, _EIGHT_BITS),
            (4, 8, _EIGHT_BITS),
            (4, 8, {"offload": "optimizer", "offload_to": "disk"}),
        )
    ),
    *(
        Scenario(
            model="llama_70b",
            batch=4,
            machine="dgx-h100",
            ranks=8,
            micro_steps=micro_steps,
            options={**_RECOMPUTED, "stage": 3, "offload": offload},
        )
        for micro_steps, offload in (
            (1, "optimizer,gradients"),
            (1, "optimizer,gradients,parameters"),
            (8, "optimizer,gradients"),
        )
    ),
    Scenario(
        model="gpt_175b",
        batch=2,
        machine="dgx-h100",
        ranks=64,
        options={**_RECOMPUTED, "stage": 3, "offload": "optimizer,gradients"},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperResult:
    """The bytes of a rank by space, its limits by space, and the step with and without offloading."""

    scenario: Scenario
    bytes_by_space: Mapping[Space, int]
    limits: Mapping[Space, float]
    simulation: Simulation
    plain_s: float

    @property
    def tflops(self) -> float:
        """TFLOP/s of a rank, with recomputation."""
        return self.simulation.flops / self.simulation.step_s / 1e12

    def cells(self) -> list[str]:
        """A row of the table; sizes of the host and the disk are those of a node."""
        scenario = self.scenario
        sizes = [
            f"{format_bytes(self.bytes_by_space[space])} of {format_bytes(round(self.limits[space]))}"
            if self.bytes_by_space[space]
            else "0"
            for space in Space
        ]
        return [
            scenario.model,
            f"{scenario.ranks} of {scenario.machine}",
            scenario.offloaded,
            str(scenario.batch),
            str(scenario.micro_steps),
            *sizes,
            f"{self.simulation.step_s:.2f}",
            f"{self.tflops:.0f}",
            f"{self.plain_s / self.simulation.step_s:.0%}",
        ]


def simulated(scenario: Scenario) -> PaperResult:
    """Compile and simulate a scenario."""
    machine = load_machine(scenario.machine)
    compiled = _compiled(scenario, scenario.options)
    plain = {name: scenario.options[name] for name in _RECOMPUTED.keys() | {"stage"}}
    return PaperResult(
        scenario=scenario,
        bytes_by_space=_bytes_by_space(compiled, machine),
        limits={
            Space.DEVICE: machine.memory.size_bytes.value,
            Space.HOST: machine.host.memory.size_bytes.value,
            Space.DISK: machine.disk.size_bytes.value,
        },
        simulation=zeroir.simulate(compiled, machine),
        plain_s=zeroir.simulate(_compiled(scenario, plain), machine).step_s,
    )


def _compiled(scenario: Scenario, options: Mapping[str, object]) -> CompiledProgram:
    return zeroir.compile(
        offload_models.module(scenario.model),
        batch=offload_models.batch(scenario.model, scenario.batch),
        world_size=scenario.ranks,
        micro_steps=scenario.micro_steps,
        optimizer="adamw",
        **options,  # type: ignore[arg-type]
    )


def _bytes_by_space(compiled: CompiledProgram, machine: Machine) -> Mapping[Space, int]:
    """Bytes of a rank's device, and of a node's host and disk, without the snapshots of saving."""
    program = compiled.program
    ranks = min(program.mesh.world_size, machine.node_ranks)
    sizes = {space: footprint(program, space=space).total_bytes for space in Space}
    return {
        Space.DEVICE: sizes[Space.DEVICE],
        Space.HOST: ranks * (sizes[Space.HOST] - snapshot_bytes(program)),
        Space.DISK: ranks * sizes[Space.DISK],
    }


def published_rows(results: Sequence[PaperResult]) -> list[list[str]]:
    """The published rows, with our simulated figure where a scenario has the same model and GPU."""
    by_model = {result.scenario.model: result for result in results}
    rows = []
    for row in json.loads(PAPERS.read_text())["rows"]:
        ours = by_model.get(row["ours"])
        figure = "" if ours is None else f"{ours.tflops:.0f}"
        rows.append([row["system"], row["what"], f"{row['tflops']}", figure, row["source"]])
    return rows
