"""The user's own modules that a file imports, and those that they import: found and hashed without running any.

Python's own modules, what is installed, torch and zeroir are not the user's.
"""

from __future__ import annotations

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

_LIBRARIES = frozenset({"torch", "zeroir"})
"""Not the user's wherever they lie: torch may be built in its own folder, and so is a checkout of zeroir."""


def hashes_of_imports(source: bytes) -> dict[str, str]:
    """SHA-256 by the name of each of the user's modules that the text of a Python file imports, or that they import.

    An import counts wherever it stands, and whether it is carried out or not. Text that is no Python imports nothing.
    """
    specs: dict[str, ModuleSpec | None] = {}
    found: dict[str, str] = {}
    waiting = [(source, "")]
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
            found[name] = hashlib.sha256(data).hexdigest()
            if file.suffix == ".py":
                is_package = spec.submodule_search_locations is not None
                waiting.append((data, name if is_package else name.rpartition(".")[0]))
    return found


def hashes_of_modules(names: set[str]) -> dict[str, str]:
    """SHA-256 of those of the named modules that are the user's; names of no module are left out."""
    specs: dict[str, ModuleSpec | None] = {}
    found: dict[str, str] = {}
    for name in sorted(names):
        for whole in _with_parents(name):
            if whole not in specs:
                specs[whole] = _find(whole, specs)
        spec = specs[name]
        file = None if spec is None else _users_file(spec)
        if file is not None:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def is_in_a_library(file: Path) -> bool:
    """Whether a file is Python's or installed."""
    whole = file.resolve()
    return any(whole.is_relative_to(folder) for folder in _library_folders())


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """Names of what may be modules, packages before what is in them."""
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
    """The whole name of what is imported from; None where a relative import leads nowhere."""
    if not node.level:
        return node.module
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return None
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _find(name: str, specs: Mapping[str, ModuleSpec | None]) -> ModuleSpec | None:
    """Where Python has a module from, or would have it from; None where it is none or not the user's."""
    parent, _, _ = name.rpartition(".")
    places: list[str] | None = None
    if parent:
        above = specs.get(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        places = list(above.submodule_search_locations)
    elif name in _LIBRARIES or name in sys.stdlib_module_names:
        return None
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    spec = loaded if isinstance(loaded, ModuleSpec) else _first_spec(name, places)
    return None if spec is None or _is_installed(spec) else spec


def _first_spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return None


def _is_installed(spec: ModuleSpec) -> bool:
    return spec.origin is not None and is_in_a_library(Path(spec.origin))


def _users_file(spec: ModuleSpec) -> Path | None:
    """The file of a module; None where it has none, as a package that is no more than a folder."""
    if spec.origin is None or not spec.has_location:
        return None
    file = Path(spec.origin)
    return file if file.is_file() else None


@cache
def _library_folders() -> tuple[Path, ...]:
    """Where Python's own modules lie and what is installed."""
    paths = sysconfig.get_paths()
    folders = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(Path(folder).resolve() for folder in folders)
