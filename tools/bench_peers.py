"""A training step of zeroir against PyTorch's and DeepSpeed's own ZeRO, all in one run on this machine's CPU.

    python -m tools.bench_peers [peers | stages | techniques] [--only NAME ...] [--rounds 9] [--steps 3] [--record FILE]

Every contestant has its own processes, one per rank, with one thread each; they sleep while others are measured. A
round times each contestant once, in an order that changes from round to round. Ratios are taken within a round, so that
other work of the machine affects all contestants equally. ``zeroir 3`` takes part twice: the difference between its
copies is the noise. All train the same model on the same data with torch's fused AdamW, and their losses are compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from tools import record_file
from tools.peers.own import variants

SETS = {
    "peers": (
        "torch alone",
        "DDP",
        "FSDP2",
        "FSDP2 compiled",
        "DeepSpeed 3",
        "zeroir alone",
        "zeroir 1",
        "zeroir 3",
        "zeroir 3 again",
        "zeroir alone inductor",
        "zeroir 3 inductor",
    ),
    "stages": (
        "DDP",
        "ZeroRedundancyOptimizer",
        "DeepSpeed 1",
        "DeepSpeed 2",
        "DeepSpeed 3",
        "zeroir 0",
        "zeroir 1",
        "zeroir 2",
        "zeroir 3",
    ),
    "techniques": (
        "zeroir 3",
        "zeroir 3 again",
        *(name for name in variants(2) if "without" in name),
        "zeroir 3 inductor",
    ),
}
NAMES = tuple(dict.fromkeys(name for names in SETS.values() for name in names))


@dataclass(frozen=True, kw_only=True)
class RatioTarget:
    """An upper limit of a ratio of two contestants' steps, or of their memory, and a ratio to aim at."""

    numerator: str
    denominator: str
    must: float
    aim: float
    is_memory: bool = False


TARGETS = (
    RatioTarget(numerator="zeroir 3", denominator="FSDP2", must=0.80, aim=0.60),
    RatioTarget(numerator="zeroir 3", denominator="FSDP2 compiled", must=0.95, aim=0.75),
    RatioTarget(numerator="zeroir 3", denominator="DeepSpeed 3", must=0.65, aim=0.50),
    RatioTarget(numerator="zeroir 3", denominator="zeroir alone", must=1.25, aim=1.10),
    RatioTarget(numerator="zeroir 1", denominator="DDP", must=1.00, aim=0.85),
    RatioTarget(numerator="zeroir 3", denominator="FSDP2", must=0.70, aim=0.55, is_memory=True),
    RatioTarget(numerator="zeroir 3 inductor", denominator="FSDP2 compiled", must=0.95, aim=0.75),
    RatioTarget(
        numerator="zeroir 3 inductor", denominator="zeroir alone inductor", must=1.25, aim=1.10
    ),
    RatioTarget(numerator="zeroir 1 inductor", denominator="DDP", must=1.00, aim=0.85),
)


@dataclass
class PeerRecord:
    """Measurements of one contestant: seconds per step by round, losses by step, bytes of its largest rank."""

    name: str
    first_step_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bare_bytes: int = 0
    peak_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """Peak resident memory above that of a process that has only imported torch and joined the job."""
        return self.peak_bytes - self.bare_bytes

    def cells(self) -> list[str]:
        """A row of a table with the columns ``COLUMNS``."""
        ordered = sorted(self.seconds)
        quarter = len(ordered) // 4
        return [
            self.name,
            f"{1000 * median(ordered):.0f}",
            f"{1000 * ordered[quarter]:.0f} to {1000 * ordered[-1 - quarter]:.0f}",
            f"{self.first_step_seconds:.1f}",
            f"{self.own_bytes / 1e6:.0f}",
        ]


COLUMNS = ("", "step, ms", "middle half", "first step, s", "peak MB above bare")


class Contestant:
    """The processes of one contestant."""

    def __init__(self, name: str, world_size: int, folder: Path) -> None:
        self.record = PeerRecord(name=name)
        self._ranks: list[subprocess.Popen[str]] = []
        (folder / name).mkdir()
        for rank in range(world_size):
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
            }
            command = [sys.executable, "-m", "tools.peers.rank", name]
            self._ranks.append(
                subprocess.Popen(
                    [*command, str(rank), str(world_size), str(folder), str(folder / name)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(folder / name / f"{rank}.log").open("w"),
                    text=True,
                )
            )
        self._logs = folder / name

    def warm_up(self) -> None:
        """Wait for the first step, which includes any compilation."""
        for report in self._reports():
            self.record.first_step_seconds = float(str(report["first_step_seconds"]))

    def run(self, steps: int, *, is_measured: bool = True) -> None:
        """Take steps on every rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        reports = self._reports()
        if is_measured:
            self.record.seconds.append(max(float(str(report["seconds"])) for report in reports))
        losses = reports[0]["losses"]
        assert isinstance(losses, list)
        self.record.losses += losses
        self.record.bare_bytes = max(int(str(report["bare_bytes"])) for report in reports)
        self.record.peak_bytes = max(int(str(report["peak_bytes"])) for report in reports)

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _reports(self) -> list[dict[str, object]]:
        lines = [rank.stdout.readline() if rank.stdout else "" for rank in self._ranks]
        if not all(lines):
            log = (self._logs / f"{lines.index('')}.log").read_text()
            raise SystemExit(f"{self.record.name} failed:\n{log[-3000:]}")
        return [json.loads(line) for line in lines]


def measure(names: Sequence[str], rounds: int, steps: int, world_size: int) -> list[PeerRecord]:
    """Compile zeroir's programs, start all contestants, and measure them in turn."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        own = variants(world_size)
        for name in names:
            if name in own:
                own[name].compile().save(folder / f"{name}.zir")
        contestants: list[Contestant] = []
        try:
            for name in names:
                contestants.append(Contestant(name, world_size, folder))
                contestants[-1].warm_up()
                contestants[-1].run(2, is_measured=False)
            for number in range(rounds):
                for turn in range(len(contestants)):
                    contestants[(turn + number) % len(contestants)].run(steps)
        finally:
            for contestant in contestants:
                contestant.close()
        return [contestant.record for contestant in contestants]


def ratio(target: RatioTarget, records: dict[str, PeerRecord]) -> float:
    """The median over rounds of the ratio of two steps, or the ratio of two peaks."""
    above, below = records[target.numerator], records[target.denominator]
    if target.is_memory:
        return above.own_bytes / below.own_bytes
    return median(a / b for a, b in zip(above.seconds, below.seconds, strict=True))


RATIO_COLUMNS = ("ratio", "measured", "must be at most", "aim")


def ratio_rows(records: dict[str, PeerRecord]) -> list[list[str]]:
    """The targets whose contestants were measured, as rows of a table with the columns ``RATIO_COLUMNS``."""
    return [
        [
            f"{'peak memory' if target.is_memory else 'step'}: {target.numerator} / {target.denominator}",
            f"{ratio(target, records):.2f}",
            f"{target.must:.2f}",
            f"{target.aim:.2f}",
        ]
        for target in TARGETS
        if target.numerator in records and target.denominator in records
    ]


def show(records: Sequence[PeerRecord], console: Console) -> None:
    """Print the measurements and the targets."""
    by_name = {record.name: record for record in records}
    rows = [[*record.cells(), f"{record.losses[-1]:.6f}"] for record in records]
    record_file.print_table([*COLUMNS, "loss"], rows)
    record_file.print_table(RATIO_COLUMNS, ratio_rows(by_name))
    if {"zeroir 3", "zeroir 3 again"} <= by_name.keys():
        pairs = zip(by_name["zeroir 3"].seconds, by_name["zeroir 3 again"].seconds, strict=True)
        console.print(
            f"noise floor: two copies of zeroir 3 differ by {median(abs(a / b - 1) for a, b in pairs):.1%}"
        )
    ranks = [record for record in records if "alone" not in record.name]
    if ranks:
        steps = zip(*(record.losses for record in ranks), strict=True)
        spread = max(max(of_step) - min(of_step) for of_step in steps)
        console.print(
            f"largest difference between losses of one step, all but those alone: {spread:.1e}"
        )


def main() -> int:
    """Measure, print, and write the record."""
    parser = record_file.parser(__doc__)
    parser.add_argument("set", nargs="?", choices=SETS, default="peers", help="who takes part")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="or these")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    console = Console()
    names = list(arguments.only or SETS[arguments.set])
    if importlib.util.find_spec("deepspeed") is None:
        names = [name for name in names if not name.startswith("DeepSpeed")]
        missing = "deepspeed is not installed, so it is left out: pip install 'zeroir[peers]'"
        console.print(missing, markup=False)
    records = measure(names, arguments.rounds, arguments.steps, arguments.world_size)
    show(records, console)
    content = {"records": [asdict(record) for record in records]}
    record_file.write(
        arguments.record, "bench_peers", content, {"world_size": arguments.world_size}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
