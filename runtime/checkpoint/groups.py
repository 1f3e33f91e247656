"""The settings of optimizer groups in a manifest: the keys of ``param_groups`` except parameters and names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from zeroir.checkpoint.manifest import PlainSetting, Setting, StoredGroup
from zeroir.errors import UserError
from zeroir.runtime.engine.live_optimizer import LiveOptimizer

_NO_SETTINGS: Final = frozenset({"params", "param_names", "name"})


def stored_groups(optimizer: LiveOptimizer) -> tuple[StoredGroup, ...]:
    """Return the current settings of each group.

    Raises:
        UserError: where a setting is neither a number, a text nor None.
    """
    return tuple(
        StoredGroup(
            name=group["name"],
            algorithm=algorithm.value,
            settings={
                key: _setting(value, key, group["name"])
                for key, value in group.items()
                if key not in _NO_SETTINGS
            },
            parameters=tuple(group["param_names"]),
        )
        for group, algorithm in zip(optimizer.param_groups, optimizer.algorithms, strict=True)
        if _has_parameters(group)
    )


def require_groups(path: str, groups: Sequence[StoredGroup], optimizer: LiveOptimizer) -> None:
    """Check that the optimizer accepts the stored settings of the groups with the same names.

    Raises:
        UserError: where a setting has no valid value.
    """
    stored = _settings(groups)
    try:
        optimizer.require([stored.get(name, {}) for name in optimizer.group_names])
    except UserError as error:
        raise UserError(f"'{path}' has settings that no optimizer takes: {error}") from error


def restore_groups(groups: Sequence[StoredGroup], optimizer: LiveOptimizer) -> Iterator[str]:
    """Set each group's settings to those stored under the same name; yield a sentence for each group without any."""
    stored = _settings(groups)
    for group in filter(_has_parameters, optimizer.param_groups):
        settings = stored.get(group["name"])
        if settings is None:
            yield (
                f"has no settings for the optimizer's group {group['name']} (it has {', '.join(stored)}): the group "
                "keeps those that it has"
            )
            continue
        group.update(settings)


def _has_parameters(group: Mapping[str, object]) -> bool:
    return bool(group["param_names"])


def _settings(groups: Sequence[StoredGroup]) -> Mapping[str, Mapping[str, Setting]]:
    return {group.name: group.settings for group in groups}


def _setting(value: object, key: str, group: str) -> Setting:
    if isinstance(value, tuple | list):
        return tuple(_plain(item, key, group) for item in value)
    return _plain(value, key, group)


def _plain(value: object, key: str, group: str) -> PlainSetting:
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise UserError(
        f"{key} of group {group} of engine.optimizer is {value!r}, which a checkpoint cannot hold: give it a finite "
        "number, a text or None."
    )
