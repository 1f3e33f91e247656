"""The difference between two checkpoints as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from math import sqrt

from rich.console import Group, RenderableType
from rich.text import Text

from zeroir.convert.compare import CheckpointComparison, TensorDifference, TensorKey
from zeroir.report.names import counted, shortened
from zeroir.report.tables import Lines, columns_table


def render_comparison(comparison: CheckpointComparison, first: str, second: str) -> RenderableType:
    """Render a line for each changed tensor, and the totals of each quantity."""
    if comparison.is_equal:
        return Text(f"{first} and {second} hold equal states.")
    parts: list[RenderableType] = []
    if comparison.facts:
        table = columns_table("fact", "first", "second", figures=("first", "second"))
        for fact in comparison.facts:
            table.add_row(fact.name, _told(fact.first), _told(fact.second))
        parts.append(Lines(table=table, is_foldable=True))
    changed = [tensor for tensor in comparison.tensors if tensor.changed_numel]
    if changed:
        table = columns_table(
            "tensor",
            "quantity",
            "changed",
            "norm",
            "relative",
            "largest",
            figures=("changed", "norm", "relative", "largest"),
            title="changes",
        )
        for tensor in changed:
            table.add_row(_named(tensor.key), tensor.key.quantity, *_figures(tensor))
        parts.append(Lines(table=table, is_foldable=True))
        sums = columns_table(
            "quantity",
            "tensors",
            "changed",
            "norm",
            "relative",
            "largest",
            figures=("tensors", "changed", "norm", "relative", "largest"),
            title="sums",
        )
        for quantity, tensors in _by_quantity(comparison.tensors).items():
            sums.add_row(quantity, str(len(tensors)), *_figures(_sum(tensors)))
        parts.append(Lines(table=sums, is_foldable=True))
    for title, keys in (
        (f"Only in {first}", comparison.only_in_first),
        (f"Only in {second}", comparison.only_in_second),
        ("Of different shapes or layouts", comparison.incomparable),
    ):
        if keys:
            names = shortened([f"{key.quantity} of {_named(key)}" for key in keys])
            parts.append(
                Text(f"\n{title}: {counted(len(keys), 'tensor')}: " + ", ".join(names) + ".")
            )
    if comparison.changed_states:
        names = shortened(comparison.changed_states)
        parts.append(Text(f"\nAlso different: {', '.join(names)}."))
    same = len(comparison.tensors) - len(changed)
    if same:
        parts.append(Text(f"\n{counted(same, 'tensor')} did not change."))
    return Group(*parts)


def comparison_json(comparison: CheckpointComparison) -> dict[str, object]:
    """Return the comparison as plain data, including unchanged tensors."""
    return {
        "is_equal": comparison.is_equal,
        "facts": [
            {"name": fact.name, "first": fact.first, "second": fact.second}
            for fact in comparison.facts
        ],
        "tensors": [
            {
                **_key_json(tensor.key),
                "numel": tensor.numel,
                "changed_numel": tensor.changed_numel,
                "norm": _plain(tensor.norm),
                "first_norm": _plain(tensor.first_norm),
                "relative": _plain(tensor.relative),
                "largest": _plain(tensor.largest),
            }
            for tensor in comparison.tensors
        ],
        "only_in_first": [_key_json(key) for key in comparison.only_in_first],
        "only_in_second": [_key_json(key) for key in comparison.only_in_second],
        "incomparable": [_key_json(key) for key in comparison.incomparable],
        "changed_states": list(comparison.changed_states),
    }


def _key_json(key: TensorKey) -> dict[str, object]:
    return {"name": key.name, "quantity": key.quantity, "ranks": list(key.ranks)}


def _named(key: TensorKey) -> str:
    if not key.ranks:
        return key.name
    ranks = ", ".join(shortened([str(rank) for rank in key.ranks]))
    return f"{key.name} ({'rank' if len(key.ranks) == 1 else 'ranks'} {ranks})"


def _figures(tensor: TensorDifference) -> tuple[str, str, str, str]:
    share = f"{100 * tensor.changed_numel / tensor.numel:.3g} %" if tensor.numel else "0 %"
    return share, f"{tensor.norm:.4g}", f"{tensor.relative:.4g}", f"{tensor.largest:.4g}"


def _by_quantity(
    tensors: Sequence[TensorDifference],
) -> dict[str, list[TensorDifference]]:
    by_quantity: dict[str, list[TensorDifference]] = {}
    for tensor in tensors:
        by_quantity.setdefault(tensor.key.quantity, []).append(tensor)
    return by_quantity


def _sum(tensors: Sequence[TensorDifference]) -> TensorDifference:
    """Return the difference of all tensors as if they were one."""
    return TensorDifference(
        key=tensors[0].key,
        numel=sum(tensor.numel for tensor in tensors),
        changed_numel=sum(tensor.changed_numel for tensor in tensors),
        norm=sqrt(sum(tensor.norm**2 for tensor in tensors)),
        first_norm=sqrt(sum(tensor.first_norm**2 for tensor in tensors)),
        largest=max(tensor.largest for tensor in tensors),
    )


def _told(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _plain(value: float) -> float | str:
    """Return a number as JSON can represent it: infinities and NaN as strings."""
    return value if math.isfinite(value) else str(value)
