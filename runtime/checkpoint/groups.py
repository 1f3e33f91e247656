"""The settings of optimizer groups in a manifest: what ``param_groups`` has beside parameters and names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from pydantic import JsonValue

from zeroir.checkpoint.manifest import StoredGroup
from zeroir.errors import UserError
from zeroir.runtime.live_optimizer import LiveOptimizer

_NO_SETTINGS: Final = frozenset({"params", "param_names", "name"})


def stored_groups(optimizer: LiveOptimizer) -> tuple[StoredGroup, ...]:
    """The present settings of each group.

    Raises:
        UserError: where a setting is neither a number, a text nor None.
    """
    return tuple(
        StoredGroup(
            name=group["name"],
            algorithm=algorithm.value,
            settings={
                key: _plain(value, key, group["name"])
                for key, value in group.items()
                if key not in _NO_SETTINGS
            },
            parameters=tuple(group["param_names"]),
        )
        for group, algorithm in zip(optimizer.param_groups, optimizer.algorithms, strict=True)
    )


def restore_groups(groups: Sequence[StoredGroup], optimizer: LiveOptimizer) -> Iterator[str]:
    """Give the groups the settings of those of the same names; a sentence for each group without one."""
    stored = {group.name: group.settings for group in groups}
    for group in optimizer.param_groups:
        settings = stored.get(group["name"])
        if settings is None:
            yield (
                f"has no settings for the optimizer's group {group['name']} (it has {', '.join(stored)}): the group "
                "keeps those that it has"
            )
            continue
        for key, value in settings.items():
            # JSON has no tuples, and torch's settings no lists.
            group[key] = tuple(value) if isinstance(value, list) else value


def _plain(value: object, key: str, group: str) -> JsonValue:
    if isinstance(value, tuple | list):
        return [_plain(item, key, group) for item in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise UserError(
        f"{key} of group {group} of engine.optimizer is {value!r}, which a checkpoint cannot hold: give it a finite "
        "number, a text or None."
    )
