"""A training step of zeroir on a GPU against FSDP2, eager and compiled, all in one run.

    python -m tools.bench_gpu [--shape 24x2048x16x2048x4] [--worlds 1 8 64] [--nccl-ranks 0] [--record FILE]

Worlds above 1 are simulated: the GPU holds the memory of one rank, and collectives move nothing. ``--nccl-ranks N``
adds a world of N real ranks that share the GPU, which needs NCCL 2.30 or later; it shows how the systems wait for NCCL,
not the speed of a network.

Every contestant runs in its own process, one after the other, because two do not fit into the memory. A round runs all
of them; their order rotates from round to round. CUDA events time the steps on random tokens, after a warm-up, and the
median of all rounds counts. Bytes are the peaks of torch's allocator during the timed steps; the scratch memory of a
CUDA graph's kernels is only in the reserved bytes. MFU is the FLOPs of the matrix products and attention in the logical
program, divided by the card's dense bf16 peak. Recomputed segments do not count. Attention counts as in torch: causal
attention in full, and its backward with the scores that it computes again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

import zeroir
from tools import record_file
from tools.peers import gpu_gpt
from tools.peers.gpu import NAMES, Measurement, MeasurementTask
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, Program

PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "B200": 2250.0,  # NVIDIA HGX B200 data sheet: 4.5 PFLOP/s with sparsity
    "H200 NVL": 835.5,  # NVIDIA H200 data sheet: 1,671 with sparsity
    "H200": 989.5,  # the same: 1,979 with sparsity
    "H100 NVL": 835.5,  # NVIDIA H100 data sheet: 1,671 with sparsity
    "H100 PCIe": 756.5,  # NVIDIA H100 PCIe product brief: 1,513 with sparsity
    "H100": 989.5,  # NVIDIA H100 data sheet, SXM: 1,979 with sparsity
    "A100": 312.0,  # NVIDIA A100 data sheet
    "L40S": 362.05,  # NVIDIA L40S data sheet: 733 with sparsity for FP16, 362.05 dense
    "L4": 121.0,  # NVIDIA L4 data sheet: 242 with sparsity
}
"""Dense bf16 matrix products in TFLOP/s by card: the first of these names that the device's name contains."""

_RANK: Final = 5
"""The rank of this GPU in a simulated world that is large enough."""


@dataclass(frozen=True, kw_only=True)
class BenchWorld:
    """The ranks of a measurement: one alone, one of a simulated world, or several real ones on this GPU."""

    size: int
    is_real: bool

    @property
    def label(self) -> str:
        """The world in a few words."""
        if self.size == 1:
            return "alone"
        return f"{self.size} NCCL ranks" if self.is_real else f"1 of {self.size}"


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """Measurements of one contestant in one world: the steps of all rounds, bytes of the largest rank."""

    contestant: str
    world: BenchWorld
    seconds: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    def joined(self, ranks: Sequence[Measurement]) -> GpuRecord:
        """This record with a further round; of several ranks the slowest gives the time of a step."""
        seconds = [max(of_step) for of_step in zip(*(rank.seconds for rank in ranks), strict=True)]
        return replace(
            self,
            seconds=[*self.seconds, *seconds],
            first_step_seconds=max(rank.first_step_seconds for rank in ranks),
            losses=ranks[0].losses,
            allocated_bytes=max(self.allocated_bytes, *(rank.allocated_bytes for rank in ranks)),
            reserved_bytes=max(self.reserved_bytes, *(rank.reserved_bytes for rank in ranks)),
            notes=[note for rank in ranks for note in rank.notes],
        )


def why_not() -> str | None:
    """The reason that this machine cannot run the comparison; None where it can."""
    if not torch.cuda.is_available():
        return "There is no CUDA device here: run the comparison on a machine with a GPU."
    return None


def why_no_nccl() -> str | None:
    """The reason that several ranks cannot share a GPU here; None where they can."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version >= (2, 30):
        return None
    installed = ".".join(map(str, version))
    return (
        f"NCCL is {installed}, and several ranks share a GPU from 2.30 on: leave out --nccl-ranks."
    )


def peak_flops(name: str) -> float | None:
    """The dense bf16 peak of a device by torch's name for it, in FLOP/s; None where it is not in the table."""
    return next((1e12 * peak for card, peak in PEAK_TFLOPS.items() if card in name), None)


def step_flops(program: Program) -> int:
    """FLOPs of one forward and backward of a logical program for one micro-step, on one rank."""
    segments = program.segment_by_name
    section = program.section_by_name[LAST_MICRO_STEP]
    return sum(segments[op.segment].flops for op in section.body if isinstance(op, ops.Compute))


def environment(world: BenchWorld) -> Mapping[str, str]:
    """Further environment variables for the processes of a world."""
    if not world.is_real:
        return {}
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", "4"),
    }


def measure(
    contestant: str, world: BenchWorld, program: Path, folder: Path, warm_up: int, steps: int
) -> list[Measurement]:
    """Run a contestant once, in processes of its own. RuntimeError with the end of its output where it fails."""
    processes: list[subprocess.Popen[str]] = []
    logs: list[Path] = []
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        for rank in range(world.size) if world.is_real else [min(_RANK, world.size - 1)]:
            task = MeasurementTask(
                contestant=contestant,
                # FSDP2 needs a group even where it is alone; NCCL's then moves nothing, like a simulated one.
                group="nccl" if world.is_real or world.size == 1 else "fake",
                world_size=world.size,
                rank=rank,
                warm_up=warm_up,
                steps=steps,
                program=str(program),
                folder=meeting,
            )
            logs.append(Path(meeting, f"{rank}.log"))
            with logs[-1].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tools.peers.gpu", json.dumps(asdict(task))],
                        env={**os.environ, **environment(world)},
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        reports = [process.communicate()[0] for process in processes]
        for process, log_path in zip(processes, logs, strict=True):
            if process.returncode != 0:
                lines = log_path.read_text().strip().splitlines() or [
                    f"exit code {process.returncode}"
                ]
                raise RuntimeError(lines[-1])
    return [Measurement(**json.loads(report)) for report in reports]


def compile_programs(worlds: Sequence[BenchWorld], folder: Path) -> Mapping[BenchWorld, Path]:
    """Zeroir's program for every world, at stage 3 in bf16."""
    programs: dict[BenchWorld, Path] = {}
    for world in worlds:
        path = folder / f"{world.label.replace(' ', '-')}.zir"
        compiled = zeroir.compile(
            gpu_gpt.__file__, stage=3, world_size=world.size, precision="bf16", lr=1e-4
        )
        compiled.save(path)
        programs[world] = path
    return programs


def run_all(
    names: Sequence[str],
    programs: Mapping[BenchWorld, Path],
    folder: Path,
    rounds: int,
    warm_up: int,
    steps: int,
    console: Console,
) -> list[GpuRecord]:
    """Measure every contestant in every world; one that fails is left out of further rounds."""
    records: list[GpuRecord] = []
    for world, program in programs.items():
        by_name = {name: GpuRecord(contestant=name, world=world) for name in names}
        for number in range(rounds):
            for turn in range(len(names)):
                name = names[(turn + number) % len(names)]
                if by_name[name].error is not None:
                    continue
                try:
                    measured = measure(name, world, program, folder, warm_up, steps)
                except RuntimeError as error:
                    by_name[name] = replace(by_name[name], error=str(error))
                    console.print(f"{name}, {world.label}: {error}", markup=False)
                else:
                    by_name[name] = by_name[name].joined(measured)
        records += by_name.values()
    return records


def show(
    records: Sequence[GpuRecord], flops: int, peak: float | None, tokens: int, console: Console
) -> None:
    """Print one table; its ratios are to FSDP2 compiled in the same world."""
    table = Table(
        "world", "contestant", "step ms", "middle half", "to FSDP2 compiled", "tokens/s", "MFU",
        "allocated GB", "reserved GB", "reserved/allocated", "first step s", "loss",
    )  # fmt: skip
    steps = {(r.world, r.contestant): median(r.seconds) for r in records if r.seconds}
    for record in records:
        if not record.seconds:
            table.add_row(record.world.label, record.contestant, "failed")
            continue
        ordered = sorted(record.seconds)
        quarter, seconds = len(ordered) // 4, median(ordered)
        fsdp2_s = steps.get((record.world, "FSDP2 compiled"))
        ranks = record.world.size if record.world.is_real else 1
        is_meaningful = record.world.is_real or record.world.size == 1
        table.add_row(
            record.world.label,
            record.contestant,
            f"{1000 * seconds:.1f}",
            f"{1000 * ordered[quarter]:.1f}-{1000 * ordered[-1 - quarter]:.1f}",
            "" if fsdp2_s is None else f"{seconds / fsdp2_s:.3f}",
            f"{tokens * ranks / seconds:,.0f}",
            "" if peak is None else f"{flops * ranks / seconds / peak:.1%}",
            f"{record.allocated_bytes / 1e9:.2f}",
            f"{record.reserved_bytes / 1e9:.2f}",
            f"{record.reserved_bytes / record.allocated_bytes:.3f}",
            f"{record.first_step_seconds:.1f}",
            f"{record.losses[-1]:.4f}" if is_meaningful else "",
        )
    console.print(table)
    for record in records:
        for note in record.notes:
            console.print(f"{record.contestant}, {record.world.label}: {note}", markup=False)


def main() -> int:
    """Measure, print, and write the record."""
    parser = record_file.parser(__doc__)
    parser.add_argument(
        "--shape",
        default=gpu_gpt.SHAPE,
        help="layers x width x heads x tokens per sample x samples (%(default)s)",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--worlds", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--nccl-ranks", type=int, default=0, help="also as many real ranks")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=6, help="steps before any is timed")
    parser.add_argument("--steps", type=int, default=30, help="timed steps a round")
    parser.add_argument("--peak-tflops", type=float, help="the card's dense bf16 peak, for MFU")
    arguments = parser.parse_args()
    reason = why_not() or (why_no_nccl() if arguments.nccl_ranks else None)
    if reason is not None:
        sys.stderr.write(reason + "\n")
        return 2
    os.environ[gpu_gpt.VARIABLE] = arguments.shape
    worlds = [BenchWorld(size=size, is_real=False) for size in arguments.worlds]
    if arguments.nccl_ranks:
        worlds.append(BenchWorld(size=arguments.nccl_ranks, is_real=True))
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        programs = compile_programs(worlds, Path(folder))
        logical = zeroir.load(next(iter(programs.values()))).artifact.logical
        records = run_all(
            arguments.only,
            programs,
            Path(folder),
            arguments.rounds,
            arguments.warm_up,
            arguments.steps,
            console,
        )
    card = torch.cuda.get_device_name(0)
    peak = peak_flops(card)
    if arguments.peak_tflops is not None:
        peak = 1e12 * arguments.peak_tflops
    *_, length, samples = gpu_gpt.shape()
    flops = step_flops(logical)
    console.print(
        f"{card}, torch {torch.__version__}: {logical.parameters_numel / 1e9:.2f} billion parameters, "
        f"{length * samples} tokens and {flops / 1e12:.1f} TFLOP a step."
    )
    show(records, flops, peak, length * samples, console)
    if peak is None:
        console.print(
            f"The peak of {card} is unknown, so there is no MFU: give it by --peak-tflops."
        )
    about = {
        "card": card,
        "capability": torch.cuda.get_device_capability(0),
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
        "shape": arguments.shape,
        "parameters": logical.parameters_numel,
        "flops": flops,
        "peak_flops": peak,
    }
    content = {"records": [asdict(record) for record in records]}
    record_file.write(arguments.record, "bench_gpu", content, about)
    return 1 if any(record.error is not None for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
