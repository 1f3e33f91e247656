"""The state of the process that the code of a step may read: its environment, files, settings of torch and hooks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final, TypeGuard

from zeroir.frontend._torch_hooks import global_hooks
from zeroir.frontend.source.outside_reads import contents_of_file, names_in_folder, state_of_file
from zeroir.frontend.watch.torch_settings import replaceable, settings_read
from zeroir.frontend.watch.walk import FILE, HOOK, SETTING, Walk

_OF_ENVIRONMENT: Final = frozenset(("environ", "getenv"))
"""The attributes of ``os`` by which code reads the environment."""


def add_process(walk: Walk) -> None:
    """Add the environment, files, settings and functions of torch, and hooks of all modules."""
    if walk.reads.variables or not walk.code.of_users.isdisjoint(_OF_ENVIRONMENT):
        _add_environment(walk)
    for path, line in walk.reads.paths.items():
        name = f"The path {path}"
        walk.lines[name] = line
        walk.leaves[name] = (FILE, "exists" if Path(path).exists() else "is missing")
        walk.quick.add_computed(Path(path).exists)
    for path, line in walk.reads.files.items():
        name = f"The file {path}"
        walk.lines[name] = line
        walk.leaves[name] = (FILE, contents_of_file(path))
        walk.quick.add_computed(partial(state_of_file, path))
    for path, line in walk.reads.folders.items():
        name = f"The folder {path}"
        walk.lines[name] = line
        walk.leaves[name] = (FILE, repr(names_in_folder(path)))
        walk.quick.add_computed(partial(names_in_folder, path))
    for line in walk.reads.current_folder[:1]:
        walk.lines["The current folder"] = line
        walk.leaves["The current folder"] = (str, repr(str(Path.cwd())))
        walk.quick.add_computed(Path.cwd)
    for expression, read in settings_read(walk.code.of_users):
        walk.leaves[expression] = (SETTING, str(read()))
        walk.quick.add_computed(read)
    modules = [each for each in walk.seen.values() if _is_of_torch(each)]
    for expression, space, key, present in replaceable(walk.code.of_users, modules):
        add_replaceable(walk, expression, space, key, present)
    for number, hook in enumerate(global_hooks()):
        walk.seen[id(hook)] = hook
        walk.leaves[f"all modules.hooks[{number}]"] = (HOOK, id(hook))
    walk.quick.add_computed(global_hooks)


def add_replaceable(
    walk: Walk, name: str, space: Mapping[str, object], key: str, value: object
) -> None:
    """Add a function of torch that a script may replace."""
    walk.leaves[name] = (SETTING, type(value), id(value))
    walk.seen[id(value)] = value
    walk.quick.add_global(space, key, value)


def _add_environment(walk: Walk) -> None:
    """Add the variables of the process's environment that the user's code mentions, or has read."""
    for name in sorted({*walk.code.of_users, *walk.reads.variables} & os.environ.keys()):
        label = f"os.environ[{name!r}]"
        walk.lines.setdefault(label, walk.reads.variables.get(name, ""))
        walk.leaves[label] = (str, repr(os.environ[name]))
    encoded = vars(os.environ)["_data"]
    walk.quick.add_container(encoded, dict(encoded))


def _is_of_torch(value: object) -> TypeGuard[ModuleType]:
    """Return whether an object is a Python module of torch."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch"
