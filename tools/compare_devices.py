"""Compare the graphs of models for a CPU with those for a CUDA device that is not there, in three precisions.

    python -m tools.compare_devices [MODEL ...] [--record FILE]

Both graphs are captured without a device, as ``zeroir compile --device`` does. A process of its own, the judge, traces
each model on fake tensors of the device and runs its kernels on them (``tests/support/absent_cuda/traced.py``). The
graph for CUDA has to be the judge's. Where it differs from the one for a CPU, the program declares that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

from tests.support.absent_cuda.compared_models import NAMES, made
from tests.support.absent_cuda.library import build_guard
from tests.support.absent_cuda.traced import Call, Judged, Result, calls_of
from tools import record_file
from zeroir.config.precision import FloatName

ROOT: Final = Path(__file__).parents[1]
PRECISIONS: Final[tuple[FloatName, ...]] = ("fp32", "bf16", "fp16")
HEAD: Final = [
    *("model", "operators", "declared for each device", "other strides"),
    *("other operators", "the judge's trace", "calls replayed"),
]
SAME: Final = "the same"

ASKING: Final[Mapping[str, str]] = {
    "causal/mixtral": "the code asks for the device of a tensor",
}
"""Models whose trace on the device is another one, with the reason."""


CONVERTING: Final = frozenset(
    {"aten._softmax.default", "aten._softmax_backward_data.default", "aten._to_copy.default"}
)
"""Operators that differ where FP16 is converted for a softmax: CUDA's does so itself, or takes converted ones."""
CONVERTED: Final = "a softmax converts FP16 itself"


@dataclass(slots=True)
class GraphDifference:
    """How the second of two graphs differs: operators whose results have other types, or strides, and operators."""

    types: Counter[str] = field(default_factory=Counter)
    strides: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)

    def add(self, other: GraphDifference) -> None:
        """Count what differs in another precision, too."""
        self.types |= other.types
        self.strides |= other.strides
        self.operators |= other.operators

    @property
    def differing(self) -> Counter[str]:
        """Every operator that differs."""
        return self.types | self.strides | self.operators


def difference(first: Sequence[Call], second: Sequence[Call]) -> GraphDifference:
    """How two graphs differ; of operators that one has more often, results are not compared."""
    found = GraphDifference()
    calls = [_by_operator(graph) for graph in (first, second)]
    for op in {op for by_operator in calls for op in by_operator}:
        one, other = (by_operator.get(op, []) for by_operator in calls)
        if len(one) != len(other):
            found.operators[op] += abs(len(one) - len(other))
            continue
        for results, others in zip(one, other, strict=True):
            for result, second_result in zip(results, others, strict=True):
                if result == second_result:
                    continue
                if result and second_result and result[:2] == second_result[:2]:
                    found.strides[op] += 1
                else:
                    found.types[op] += 1
    return found


def _by_operator(graph: Sequence[Call]) -> Mapping[str, list[tuple[Result, ...]]]:
    calls: dict[str, list[tuple[Result, ...]]] = defaultdict(list)
    for call in graph:
        calls[call.op].append(call.results)
    return calls


@dataclass(slots=True)
class Compared:
    """What was found of a model in all precisions."""

    operators: int = 0
    replayed: int = 0
    between_devices: GraphDifference = field(default_factory=GraphDifference)
    from_judge: GraphDifference = field(default_factory=GraphDifference)
    faults: list[str] = field(default_factory=list)

    def is_right(self, name: str) -> bool:
        """Whether the graph for CUDA is the judge's, and all calls of its kernels run."""
        return not self.faults and (
            name in ASKING or self.from_judge.differing.keys() <= CONVERTING
        )

    def row(self, name: str) -> list[str]:
        """The row of the table."""
        differing = self.from_judge.differing
        verdict = ASKING.get(name) or _listed(differing)
        if differing and differing.keys() <= CONVERTING:
            verdict = CONVERTED
        return [
            name,
            str(self.operators),
            _listed(self.between_devices.types),
            _listed(self.between_devices.strides),
            _listed(self.between_devices.operators),
            verdict or SAME,
            str(self.replayed) if not self.faults else self.faults[0],
        ]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(
        f"{op.removesuffix('.default')} × {count}" for op, count in sorted(counts.items())
    )


def compare(
    names: Sequence[str], precisions: Sequence[FloatName] = PRECISIONS
) -> dict[str, Compared]:
    """Compare models."""
    found = {name: Compared() for name in names}
    cases = [(name, precision) for name in names for precision in precisions]
    with TemporaryDirectory() as folder:
        guard = Path(folder) / "guard.so"
        build_guard(guard)
        subprocess.run(
            [
                *(sys.executable, "-m", "tests.support.absent_cuda.traced", str(guard), folder),
                *(f"{precision}:{name}" for name, precision in cases),
            ],
            cwd=ROOT,
            check=True,
        )
        for number, (name, precision) in enumerate(cases):
            calls, *others = json.loads((Path(folder) / f"{number:03}").read_text())
            judged = Judged([_call(*call) for call in calls], *others)
            _compare(found[name], name, precision, judged)
    return found


def _call(op: str, results: Sequence[Sequence[object] | None]) -> Call:
    """A call as it was before it was written."""
    read = (
        r and (r[0], *(tuple(cast("list[int]", numbers)) for numbers in r[1:])) for r in results
    )
    return Call(op, cast("tuple[Result, ...]", tuple(read)))


def _compare(found: Compared, name: str, precision: FloatName, judged: Judged) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_cpu, on_cuda = (calls_of(made(name), precision, device) for device in ("cpu", "cuda"))
    found.operators = max(found.operators, len(on_cuda))
    found.replayed += judged.replayed
    found.between_devices.add(difference(on_cpu, on_cuda))
    if judged.fault:
        found.faults.append(f"{precision}: {judged.fault}")
    if judged.why_not:
        if name not in ASKING:
            found.faults.append(f"{precision}: {judged.why_not}")
        return
    found.from_judge.add(difference(judged.calls, on_cuda))


def main() -> int:
    """Print the table; the exit status is 1 where a graph is not the judge's."""
    parser = record_file.parser(__doc__ or "")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {'; '.join(NAMES)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - set(NAMES):
        parser.error(f"There is no model {unknown.pop()!r}: choose from {'; '.join(NAMES)}.")
    found = compare(chosen.models or NAMES)
    rows = [each.row(name) for name, each in found.items()]
    record_file.publish(chosen.record, "compare_devices", HEAD, rows)
    return int(not all(each.is_right(name) for name, each in found.items()))


if __name__ == "__main__":
    sys.exit(main())
