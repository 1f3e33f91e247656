"""The treatment of every key as Markdown tables for the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from zeroir.deepspeed.model import DeepSpeedConfiguration
from zeroir.deepspeed.optimizers import OPTIMIZERS
from zeroir.deepspeed.read import block_of
from zeroir.deepspeed.treatment import Treatment, treatment_of
from zeroir.schedules import DEEPSPEED_SCHEDULES, SCHEDULES

Row = tuple[str, str, str]
"""A key, its kind and the reason."""


def treatments(
    kind: type[BaseModel] = DeepSpeedConfiguration, place: str = ""
) -> Iterator[tuple[str, Treatment]]:
    """Yield every dotted key with its treatment, except blocks with treatments inside."""
    for key, field in kind.model_fields.items():
        inner = block_of(field)
        if inner is None:
            yield f"{place}{key}", treatment_of(field)
        else:
            yield from treatments(inner, f"{place}{key}.")


def tables() -> str:
    """Return the tables of the top level, of each block, and of the parameters of optimizers and schedules."""
    blocks: dict[str, list[Row]] = {}
    for key, treatment in treatments():
        block, _, name = key.rpartition(".")
        blocks.setdefault(block, []).append((name, treatment.kind, treatment.reason))
    parts = [_table(f"`{block}`" if block else "Top level", rows) for block, rows in blocks.items()]
    for model in dict.fromkeys(OPTIMIZERS.values()):
        names = " and ".join(name for name, kind in OPTIMIZERS.items() if kind is model)
        own = [(key, treatment_of(field)) for key, field in model.model_fields.items()]
        rows = [(key, treatment.kind.value, treatment.reason) for key, treatment in own]
        parts.append(_table(f"`optimizer.params` of {names}", rows))
    schedules = (
        f"| {name} | {', '.join(f'`{key}`' for key in SCHEDULES[name].model_fields)} |"
        for name in DEEPSPEED_SCHEDULES
    )
    head = "### `scheduler.params`\n\nAll are honoured.\n\n| schedule | parameters |\n|---|---|\n"
    parts.append(head + "\n".join(schedules) + "\n")
    return "\n".join(parts)


def _table(title: str, rows: list[Row]) -> str:
    head = f"### {title}\n\n| key | treatment | how, or why |\n|---|---|---|\n"
    return head + "".join(f"| `{key}` | {kind} | {reason} |\n" for key, kind, reason in rows)
