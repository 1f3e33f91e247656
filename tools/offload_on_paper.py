"""Simulated steps of models whose training state exceeds the memory of their devices, for `tools.bench_offload`.

Nothing is allocated or run: a model is captured on the meta device, its program is compiled and proved, and the step is
simulated. So is the step of the same program without offloading, as if the device had memory for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import zeroir
from tools import offload_models
from zeroir.api import CompiledProgram
from zeroir.cost.machine import Machine, load_machine
from zeroir.cost.simulate import Simulation
from zeroir.ir.buffers import Space
from zeroir.ir.byte_sizes import format_bytes
from zeroir.memory.footprint import footprint
from zeroir.memory.states import snapshot_bytes

PAPERS = Path(__file__).parents[1] / "tests" / "data" / "offload_papers.json"
HEAD = [
    *("model", "on", "offloaded", "batch", "micro-steps", "device", "host", "disk"),
    *("step, s", "TFLOP/s per GPU", "speed kept"),
]
SPECULATION_HEAD = [
    *("machine", "batch", "micro-steps", "without clipping", "clipping, waiting", "speculative"),
    "redone",
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
    options: tuple[tuple[str, object], ...]

    @property
    def offloaded(self) -> str:
        """What is offloaded, as the command line says it."""
        options = dict(self.options)
        words = [str(options["offload"])] if "offload" in options else []
        words += [
            f"--{name.replace('_', '-')} {options[name]}"
            for name in _OFFLOADING[1:]
            if name in options
        ]
        return " ".join(words) or "nothing"

    @property
    def without_offload(self) -> Scenario:
        """The same without offloading."""
        kept = tuple(pair for pair in self.options if pair[0] not in _OFFLOADING)
        return replace(self, options=kept)


_OFFLOADING = (
    *("offload", "offload_to", "host_cache", "offload_fraction", "optimizer_bits"),
    "page_optimizer",
)


def _options(
    stage: int, *, precision: str = "bf16", **more: object
) -> tuple[tuple[str, object], ...]:
    """Options of a scenario that recomputes its layers."""
    return tuple({"stage": stage, "precision": precision, "recompute": "*", **more}.items())


SCENARIOS: Sequence[Scenario] = (
    Scenario(
        model="gpt_10b",
        batch=6,
        machine="dgx-2",
        ranks=1,
        options=_options(2, precision="fp16", offload="optimizer,gradients"),
    ),
    *(
        Scenario(
            model="llama_13b",
            batch=batch,
            machine="1xh100-pcie",
            ranks=1,
            micro_steps=micro_steps,
            options=_options(2, offload="optimizer,gradients", **offloaded),
        )
        for batch, micro_steps, offloaded in (
            (4, 1, {"optimizer_bits": 8}),
            (8, 1, {"optimizer_bits": 8}),
            (4, 8, {"optimizer_bits": 8, "offload_fraction": 0.85}),
            (4, 8, {"offload_to": "disk"}),
            (4, 8, {"offload_to": "disk", "host_cache": "65GB"}),
        )
    ),
    *(
        Scenario(
            model="llama_70b",
            batch=4,
            machine="dgx-h100",
            ranks=8,
            micro_steps=micro_steps,
            options=_options(3, offload=offload),
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
        options=_options(3, offload="optimizer,gradients"),
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


def simulated(scenarios: Iterable[Scenario]) -> Iterator[PaperResult]:
    """Compile and simulate scenarios, each also without offloading."""
    plain_s: dict[Scenario, float] = {}
    for scenario in scenarios:
        plain = scenario.without_offload
        if plain not in plain_s:
            machine = load_machine(scenario.machine)
            plain_s[plain] = zeroir.simulate(_compiled(plain), machine).step_s
        yield _result(scenario, plain_s[plain])


def _result(scenario: Scenario, plain_s: float) -> PaperResult:
    machine = load_machine(scenario.machine)
    compiled = _compiled(scenario)
    return PaperResult(
        scenario=scenario,
        bytes_by_space=_bytes_by_space(compiled, machine),
        limits={
            Space.DEVICE: machine.memory.size_bytes.value,
            Space.HOST: machine.host.memory.size_bytes.value,
            Space.DISK: machine.disk.size_bytes.value,
        },
        simulation=zeroir.simulate(compiled, machine),
        plain_s=plain_s,
    )


def _compiled(scenario: Scenario) -> CompiledProgram:
    return zeroir.compile(
        offload_models.module(scenario.model),
        batch=offload_models.batch(scenario.model, scenario.batch),
        world_size=scenario.ranks,
        micro_steps=scenario.micro_steps,
        optimizer="adamw",
        **dict(scenario.options),  # type: ignore[arg-type]
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


def published_rows(simulated_rows: Sequence[list[str]]) -> list[list[str]]:
    """The published rows, with our simulated figure where a scenario has the same model and GPU."""
    figures = {row[0]: row[HEAD.index("TFLOP/s per GPU")] for row in simulated_rows}
    rows = []
    for row in json.loads(PAPERS.read_text())["rows"]:
        figure = figures.get(row["ours"], "")
        rows.append([row["system"], row["what"], f"{row['tflops']}", figure, row["source"]])
    return rows


_CLIPPING = tuple(
    Scenario(
        model="gpt_740m",
        batch=batch,
        machine=machine,
        ranks=ranks,
        micro_steps=micro_steps,
        options=_options(3, offload="optimizer,gradients"),
    )
    for machine, ranks in (("dgx-h100", 8), ("1xh100-pcie", 1))
    for batch, micro_steps in ((16, 1), (8, 4 if ranks > 1 else 8))
)


def speculation_rows() -> Iterator[list[str]]:
    """What clipping leaves of the speed without offloading, where the host's update waits and where it does not.

    Each share is of the step with the same clipping and without offloading. ``redone`` is a step whose update is
    undone and taken again.
    """
    for scenario in _CLIPPING:
        machine = load_machine(scenario.machine)
        plain = {
            clip: zeroir.simulate(_compiled(_with(scenario.without_offload, clip=clip)), machine)
            for clip in (None, 1.0)
        }
        waiting, speculative = (
            zeroir.simulate(_compiled(_with(scenario, clip=1.0, speculate=choice)), machine)
            for choice in (False, True)
        )
        free = zeroir.simulate(_compiled(scenario), machine)
        redone_s = speculative.redone_s
        assert redone_s is not None
        yield [
            f"{scenario.ranks} of {scenario.machine}",
            f"{scenario.batch} × {offload_models.LENGTHS[scenario.model]}",
            str(scenario.micro_steps),
            f"{plain[None].step_s / free.step_s:.0%}",
            *(
                f"{plain[1.0].step_s / step_s:.0%}"
                for step_s in (waiting.step_s, speculative.step_s, redone_s)
            ),
        ]


def _with(scenario: Scenario, **more: object) -> Scenario:
    options = {name: value for name, value in more.items() if value is not None}
    return replace(scenario, options=(*scenario.options, *options.items()))
