"""Write the tables of the documents from the records of the runs that made them.

    python -m tools.record_tables

Every table stands between two comments that name its record, ``<!-- record peers.json -->`` and ``<!-- end -->``;
what is between them is replaced. Nothing there is typed by hand. A place whose record is not there yet stays empty.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tools.bench_peers import COLUMNS, RATIO_COLUMNS, SETS, PeerRecord, ratio_rows

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(
    DOCS / name
    for name in (
        *("checkpoints.md", "conformance.md", "gpu.md", "ir.md", "measurements.md", "offload.md"),
        *("operators.md", "performance.md", "shapes.md", "trust.md"),
    )
)
RECORDS = DOCS / "records"
VERDICTS_HEAD = ["verdict", "models", "which"]
_PLACE = re.compile(
    r"(<!-- record (?P<name>[a-z-]+)\.json(?P<part> [a-z]+)? -->\n).*?(<!-- end -->)", re.DOTALL
)


def rendered(page: str, records: Path = RECORDS) -> str:
    """The page with every table made from its record."""

    def table(match: re.Match[str]) -> str:
        path = records / f"{match['name']}.json"
        if not path.exists():
            return match[0]
        record = json.loads(path.read_text())
        maker = _TABLES[match["name"] + (match["part"] or "")]
        return f"{match[1]}\n{maker(record)}\n\n{match[4]}"

    return _PLACE.sub(table, page)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _contestants(record: Mapping[str, object]) -> dict[str, PeerRecord]:
    records = record["records"]
    assert isinstance(records, list)
    return {item["name"]: PeerRecord(**item) for item in records}


def _peers(record: Mapping[str, object]) -> str:
    return _markdown(COLUMNS, [contestant.cells() for contestant in _contestants(record).values()])


def _ratios(record: Mapping[str, object]) -> str:
    return _markdown(RATIO_COLUMNS, ratio_rows(_contestants(record)))


def _techniques(record: Mapping[str, object]) -> str:
    contestants = _contestants(record)
    whole = contestants["zeroir 3"]
    rows = []
    for name in SETS["techniques"]:
        variant = contestants[name]
        steps = median(a / b for a, b in zip(variant.seconds, whole.seconds, strict=True))
        rows.append([name, f"{steps:.2f}", f"{variant.own_bytes / whole.own_bytes:.2f}"])
    return _markdown(["", "step / zeroir 3", "peak memory / zeroir 3"], rows)


def _rows(record: Mapping[str, object]) -> str:
    """A record that is a table already."""
    head, rows = record["head"], record["rows"]
    assert isinstance(head, list)
    assert isinstance(rows, list)
    return _markdown(head, rows)


def _outcomes(record: Mapping[str, object]) -> str:
    """The number of samples of the conformance suite by outcome."""
    outcomes = record["outcomes"]
    assert isinstance(outcomes, dict)
    rows = [[name, f"{count:,}", meaning] for name, (count, meaning) in outcomes.items()]
    return _markdown(["outcome", "samples", "what it means"], rows)


def _refusals(record: Mapping[str, object]) -> str:
    """The reasons that samples of the conformance suite are refused, and their operators."""
    reasons = record["reasons"]
    assert isinstance(reasons, dict)
    refused: dict[str, dict[str, int]] = reasons.get("refused", {})
    rows = [
        [why, str(sum(subjects.values())), ", ".join(f"`{name}`" for name in subjects)]
        for why, subjects in sorted(refused.items(), key=lambda item: -sum(item[1].values()))
    ]
    return _markdown(["what the sentence says", "samples", "of"], rows)


def rows_by_verdict(verdicts: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The verdicts on models on batches of one shape, each with the number of models and their names."""
    by_verdict: dict[str, list[str]] = {}
    for model, (verdict, _) in sorted(verdicts.items()):
        by_verdict.setdefault(verdict, []).append(model.partition("/")[2])
    return [
        [verdict, str(len(names)), ", ".join(names)]
        for verdict in ("equal", "different", "refused", "left out")
        if (names := by_verdict.get(verdict))
    ]


def _models_with_experts(record: Mapping[str, object]) -> str:
    """The verdicts of a survey on the models with experts."""
    models, experts = record["models"], record["experts"]
    assert isinstance(models, dict)
    assert isinstance(experts, list)
    rows = rows_by_verdict({model: models[model] for model in experts})
    return _markdown(VERDICTS_HEAD, rows)


def _models_that_are(verdict: str) -> Callable[[Mapping[str, object]], str]:
    """The maker of a table of the models with a verdict, each with its sentence up to the remedy."""

    def maker(record: Mapping[str, object]) -> str:
        models = record["models"]
        assert isinstance(models, dict)
        rows = [
            [model, re.split(r"[;:] (?=a program|express|the dim )", reason)[0].rstrip(".")]
            for model, (found, reason) in models.items()
            if found == verdict
        ]
        return _markdown(["model", "what the sentence says"], rows)

    return maker


def _on_gpu(record: Mapping[str, object]) -> str:
    """Contestants on one GPU, as ratios to eager FSDP2 of the same run; what failed says how."""
    records, about = record["records"], record["about"]
    assert isinstance(records, list)
    assert isinstance(about, dict)
    base = next(r for r in records if r["contestant"] == "FSDP2")
    rows = []
    for each in records:
        if not each["seconds"]:
            rows.append([each["contestant"], f"failed: {each['error']}", "", "", ""])
            continue
        seconds = median(each["seconds"])
        ratios = (
            seconds / median(base["seconds"]),
            each["allocated_bytes"] / base["allocated_bytes"],
            each["reserved_bytes"] / base["reserved_bytes"],
        )
        mfu = f"{about['flops'] / seconds / about['peak_flops']:.1%}"
        rows.append([each["contestant"], *(f"{ratio:.3f}" for ratio in ratios), mfu])
    return _markdown(["", "step", "allocated", "reserved", "MFU"], rows)


def _part(name: str) -> Callable[[Mapping[str, object]], str]:
    """The maker of one of the tables that a record has."""

    def maker(record: Mapping[str, object]) -> str:
        table = record[name]
        assert isinstance(table, dict)
        return _rows(table)

    return maker


_TABLES: Mapping[str, Callable[[Mapping[str, object]], str]] = {
    "peers": _peers,
    "peers ratios": _ratios,
    "stages": _peers,
    "techniques": _techniques,
    "bench-gpu": _on_gpu,
    "engine": _rows,
    "compile": _rows,
    "shapes": _rows,
    "devices": _rows,
    "gpu-kernels": _rows,
    "first-step": _rows,
    "predict": _rows,
    "certificate-times": _rows,
    "certificates": _rows,
    "checkers": _rows,
    "protocol": _rows,
    "protocol-damages": _rows,
    "mutants": _rows,
    "fuzz": _rows,
    "kill-checkpoint": _rows,
    "power-cut": _rows,
    "flip-checkpoint": _rows,
    "bench-checkpoint": _rows,
    "eight-bit": _rows,
    "eight-bit-update": _rows,
    "paging": _rows,
    "fault-offload": _rows,
    "random-shapes": _rows,
    **{
        f"bench-offload {part}": _part(part)
        for part in ("traffic", "rates", "paper", "published", "speculation")
    },
    "models": _rows,
    "models refused": _models_that_are("one size"),
    "models whole": _models_that_are("as a whole"),
    "models decided": _models_that_are("several programs"),
    "models different": _models_that_are("different"),
    "causal-models": _rows,
    "causal-models experts": _models_with_experts,
    "causal-models different": _models_that_are("different"),
    "conformance": _outcomes,
    "conformance refused": _refusals,
}


def main() -> int:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
