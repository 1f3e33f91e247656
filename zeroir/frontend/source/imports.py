"""Finds and hashes the user's own modules that a file imports, directly or indirectly, without running any.

Python's own modules, installed modules, torch and zeroir are not the user's.
"""

from __future__ import annotations

import ast
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

_LIBRARIES = frozenset({"torch", "zeroir"})
"""Never the user's, in any folder: torch may be built in a checkout, and zeroir run from one."""

_INSTALLED_IN = frozenset({"site-packages", "dist-packages"})
"""The names of folders of installed modules. PYTHONPATH and ``.pth`` files may add those of other environments."""

MODEL_FILE = "_zeroir_model_"
"""The beginning of the name of a Python module that a model file became; it is the main module of its code."""

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
"""Prefixes of the file names of torch's code, of zeroir's, and of code without a file."""


def hashes_of_imports(source: bytes, package: str = "") -> dict[str, str]:
    """Return the SHA-256 of each of the user's modules that a Python file imports, directly or indirectly, by name.

    ``source`` is the file's text, and ``package`` the name of its package. Every import in it counts, whether it is
    executed or not. Text that is not valid Python imports nothing.
    """
    specs: dict[str, ModuleSpec | None] = {}
    hashes: dict[str, str] = {}
    waiting = [(source, package)]
    while waiting:
        text, package = waiting.pop()
        for name in _imported_names(text, package):
            if name in specs:
                continue
            spec = specs[name] = _find(name, specs)
            file = None if spec is None else _users_file(spec)
            if spec is None or file is None:
                continue
            data = file.read_bytes()
            hashes[name] = hashlib.sha256(data).hexdigest()
            if file.suffix == ".py":
                is_package = spec.submodule_search_locations is not None
                waiting.append((data, name if is_package else name.rpartition(".")[0]))
    return hashes


def hashes_of_modules(names: set[str]) -> dict[str, str]:
    """Return the SHA-256 of those of the named modules that exist and are the user's, by name."""
    specs: dict[str, ModuleSpec | None] = {}
    hashes: dict[str, str] = {}
    for name in sorted(names):
        for full_name in _with_parents(name):
            if full_name not in specs:
                specs[full_name] = _find(full_name, specs)
        spec = specs[name]
        file = None if spec is None else _users_file(spec)
        if file is not None:
            hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes


def file_of_module(name: str) -> Path | None:
    """Return the Python file of a module, found by its full name without running anything; None if there is none."""
    folders: list[str] | None = None
    spec: ModuleSpec | None = None
    for full_name in _with_parents(name):
        if spec is not None:
            if spec.submodule_search_locations is None:
                return None
            folders = _folders_of(spec)
        spec = _first_spec(full_name, folders)
        if spec is None:
            return None
    file = None if spec is None else _users_file(spec)
    return file if file is not None and file.suffix == ".py" else None


def is_main(module: str | None) -> bool:
    """Return whether a Python module is a script or a model file, by its name."""
    return module == "__main__" or (module or "").startswith(MODEL_FILE)


def is_known_package(module: str | None) -> bool:
    """Return whether a Python module is Python's own, torch's or zeroir's, by its name."""
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


def is_in_a_library(file: str | Path) -> bool:
    """Return whether a file is part of Python or installed, in this environment or another one on the path."""
    return _is_in_a_library(os.path.abspath(file))  # noqa: PTH100 - links are followed once


@cache
def _is_in_a_library(file: str) -> bool:
    path = Path(file).resolve()
    if not _INSTALLED_IN.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _library_folders())


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """Yield the imported names that may be modules, packages before their members."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield from _with_parents(alias.name)
            case ast.ImportFrom():
                base = _base(node, package)
                if base is None:
                    continue
                yield from _with_parents(base)
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _base(node: ast.ImportFrom, package: str) -> str | None:
    """Return the full name of the module that names are imported from.

    None if a relative import has no such module.
    """
    if not node.level:
        return node.module
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return None
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _find(name: str, specs: Mapping[str, ModuleSpec | None]) -> ModuleSpec | None:
    """Return the spec of a module, loaded or not; None if there is no such module or it is not the user's."""
    parent, _, _ = name.rpartition(".")
    folders: list[str] | None = None
    if parent:
        package = specs.get(parent)
        if package is None or package.submodule_search_locations is None:
            return None
        folders = _folders_of(package)
    elif name in _LIBRARIES or name in sys.stdlib_module_names:
        return None
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    spec = loaded if isinstance(loaded, ModuleSpec) else _first_spec(name, folders)
    return None if spec is None or _is_installed(spec) else spec


def _first_spec(name: str, folders: list[str] | None) -> ModuleSpec | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, folders)
        except KeyError:
            # Python looks for the parent of a folder without __init__.py among the imported modules.
            return _folder_as_package(name, folders or [])
        if spec is not None:
            return spec
    return None


def _folder_as_package(name: str, folders: list[str]) -> ModuleSpec:
    """Return the spec of a folder without ``__init__.py``, in one of the folders of its parent."""
    spec = ModuleSpec(name, None, is_package=True)
    places = [Path(folder) / name.rpartition(".")[2] for folder in folders]
    spec.submodule_search_locations = [str(place) for place in places if place.is_dir()]
    return spec


def _folders_of(package: ModuleSpec) -> list[str]:
    """Return the folders of a package's modules.

    None for a folder without ``__init__.py`` and with an unloaded parent.
    """
    try:
        return list(package.submodule_search_locations or ())
    except KeyError:
        return []


def _is_installed(spec: ModuleSpec) -> bool:
    return spec.origin is not None and is_in_a_library(spec.origin)


def _users_file(spec: ModuleSpec) -> Path | None:
    """Return the file of a module; None if it has none, such as a package without ``__init__.py``."""
    if spec.origin is None or not spec.has_location:
        return None
    file = Path(spec.origin)
    return file if file.is_file() else None


@cache
def _library_folders() -> tuple[Path, ...]:
    """Return the folders of Python's own modules and of installed ones."""
    paths = sysconfig.get_paths()
    folders = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(Path(folder).resolve() for folder in folders)
