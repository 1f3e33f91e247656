"""Compile torch's own samples of its operators and modules, run each a step, and compare it with plain autograd.

    python -m tools.conformance --record docs/records/conformance.json
    python -m tools.conformance --only "op norm*"
    python -m tools.conformance --resume

Processes of bounded memory judge the samples, each within a minute; a process is replaced after 400 samples. The
verdicts are kept in build/conformance.jsonl, from which ``--resume`` continues. The exit code is 1 where a sample is
wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from rich.progress import track

from tools import record_file
from tools.conformance.judge import OUTCOMES, SampleOutcome
from tools.conformance.process import Judged, Judges
from tools.conformance.samples import subjects

KEPT = Path(__file__).parents[2] / "build" / "conformance.jsonl"
BAD = (SampleOutcome.WRONG, SampleOutcome.CRASHED)


def main() -> int:
    """Judge the chosen samples, print the outcomes, and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.conformance", description="Judge torch's own samples."
    )
    parser.add_argument("--only", default="*", metavar="NAME", help="subjects, such as 'op norm*'")
    parser.add_argument("--samples", type=int, default=5, help="of each subject, at most")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--resume", action="store_true", help="keep what was judged before")
    record_file.add_option(parser)
    options = parser.parse_args()
    names = [name for name in subjects() if fnmatchcase(name, options.only)]
    if not names:
        parser.error(
            f"--only {options.only} names no subject, such as 'op add' or 'module nn.Linear'"
        )
    kept = _kept() if options.resume else {}
    KEPT.parent.mkdir(exist_ok=True)
    if not options.resume:
        KEPT.unlink(missing_ok=True)
    wanted = [name for name in names if name not in kept]
    with KEPT.open("a") as file:
        judgements = _judged(wanted, options.samples, options.jobs)
        for name, judged in track(judgements, "Judging", total=len(wanted)):
            kept[name] = judged
            file.write(json.dumps([name, judged]) + "\n")
            file.flush()
    verdicts = {name: kept[name] for name in names}
    counts = Counter(outcome for each in verdicts.values() for outcome, _ in each)
    for name, each in verdicts.items():
        for at, (outcome, why) in enumerate(each):
            if outcome in BAD:
                print(f"{outcome}: {name}, sample {at}: {why}")
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in SampleOutcome))
    record_file.write(
        options.record,
        "conformance",
        _record(verdicts),
        {"samples": options.samples},
        after=record_file.commands_of(options.record) if options.resume else (),
    )
    return 1 if any(counts[outcome] for outcome in BAD) else 0


def _judged(names: Sequence[str], samples: int, jobs: int) -> Iterator[tuple[str, list[Judged]]]:
    """The verdicts on each subject, in order."""
    with Judges() as judges, ThreadPoolExecutor(jobs) as threads:
        yield from zip(
            names, threads.map(lambda name: judges.judged(name, samples), names), strict=True
        )


def _kept() -> dict[str, list[Judged]]:
    if not KEPT.exists():
        return {}
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()]
    return {name: [(SampleOutcome(outcome), why) for outcome, why in each] for name, each in lines}


def _record(verdicts: Mapping[str, Sequence[Judged]]) -> dict[str, object]:
    """Counts by outcome, and the reasons of all outcomes but right and skipped, each with its subjects."""
    counts = Counter(outcome for each in verdicts.values() for outcome, _ in each)
    reasons: dict[str, dict[str, Counter[str]]] = {}
    for name, each in verdicts.items():
        for outcome, why in each:
            if outcome not in (SampleOutcome.RIGHT, SampleOutcome.SKIPPED):
                counts_by_subject = reasons.setdefault(outcome, {}).setdefault(
                    _shortened(why), Counter()
                )
                counts_by_subject[name] += 1
    return {
        "subjects": len(verdicts),
        "outcomes": {outcome: [counts[outcome], OUTCOMES[outcome]] for outcome in SampleOutcome},
        "reasons": reasons,
    }


def _shortened(why: str) -> str:
    """A reason without the position of the sample's call, the operator's name and the remedy."""
    why = re.sub(r"^\S*(samples|judge)\.py(:\d+)?: ", "", why)
    why = re.sub(r"^\S*(samples|judge)\.py(:\d+)? ", "It ", why)
    why = re.sub(r" at \S*(samples|judge)\.py(:\d+)?", "", why)
    return re.sub(r" \((aten|prims)\.[\w.]+\)", "", why.partition(";")[0]).rstrip(".")[:160]


if __name__ == "__main__":
    sys.exit(main())
