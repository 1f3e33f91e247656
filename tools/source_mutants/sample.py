"""Mutants of the source, made by the operators of mutmut, and samples of them.

Bodies of functions and methods are mutated, of properties too; what runs at import is not. A mutant is chosen by its
own digest: other source in other functions changes nothing about it.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import libcst as cst
from mutmut.mutation.mutators import mutation_operators

from tools.source_mutants.packages import PACKAGES, modules

_ALWAYS_RIGHT = frozenset(("len", "isinstance", "assert_never"))
"""Calls that any test notices to be wrong."""
_CONTEXT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A function of a module, changed in one place.

    ``diff`` has no line numbers; ``module_source`` is the whole module with the change.
    """

    package: str
    module: str
    function: str
    diff: str
    file: Path
    module_source: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from all others, in other revisions, too."""
        return self.module, self.function, self.diff


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edit:
    function: cst.FunctionDef
    name: str
    old: cst.CSTNode
    new: cst.CSTNode
    digest: str


class _Edits(cst.CSTVisitor):
    """All edits of the bodies of a module's functions."""

    def __init__(self, seed: int, module: str) -> None:
        super().__init__()
        self.made: dict[str, _Edit] = {}
        self._salt = f"{seed} {module}"
        self._scopes: list[str] = []
        self._outermost: cst.FunctionDef | None = None
        self._body: cst.CSTNode | None = None
        self._is_in_body = False
        self._counts: Counter[str] = Counter()

    def on_visit(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.Annotation() | cst.Decorator():
                return False
            case cst.Call(func=cst.Name(value=name)) if name in _ALWAYS_RIGHT:
                return False
            case cst.ClassDef() if self._outermost is None:
                self._scopes.append(node.name.value)
            case cst.FunctionDef() if self._outermost is None:
                self._outermost, self._body = node, node.body
                self._scopes.append(node.name.value)
            case _ if node is self._body:
                self._is_in_body = True
            case cst.FunctionDef():
                pass
            case _ if self._is_in_body:
                self._edit(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if original_node is self._body:
            self._is_in_body = False
        elif original_node is self._outermost:
            self._outermost = None
            self._scopes.pop()
        elif isinstance(original_node, cst.ClassDef) and self._outermost is None:
            self._scopes.pop()

    def _edit(self, node: cst.CSTNode) -> None:
        assert self._outermost is not None
        name = ".".join(self._scopes)
        for kind, operator in mutation_operators:
            for new in operator(node) if isinstance(node, kind) else ():
                text = f"{self._salt} {name} {_code(node)} -> {_code(new)}"
                self._counts[text] += 1
                digest = hashlib.sha256(f"{text} {self._counts[text]}".encode()).hexdigest()
                self.made[digest] = _Edit(
                    function=self._outermost, name=name, old=node, new=new, digest=digest
                )


class _Replacement(cst.CSTTransformer):
    """Replaces one node by another one."""

    def __init__(self, edit: _Edit) -> None:
        super().__init__()
        self._edit = edit
        self._has_begun = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._has_begun |= node is self._edit.function
        is_another = isinstance(node, cst.FunctionDef) and not self._has_begun
        return node is not self._edit.old and not is_another

    def on_leave(  # type: ignore[override]  # every kind of node passes through
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode:
        return self._edit.new if original_node is self._edit.old else updated_node


def sample(root: Path, seed: int, count: int) -> Iterator[Mutant]:
    """So many mutants of each package, or all where there are fewer; the packages take turns."""
    edits: dict[str, list[tuple[_Edit, Path, str]]] = {package: [] for package in PACKAGES}
    trees: dict[Path, cst.Module] = {}
    for package, file, module in modules(root):
        trees[file] = cst.parse_module(file.read_text("utf-8"))
        visitor = _Edits(seed, module)
        trees[file].visit(visitor)
        edits[package] += [(edit, file, module) for edit in visitor.made.values()]
    made: Counter[str] = Counter()
    known: set[tuple[str, str, str]] = set()
    queues = {
        package: iter(sorted(own, key=lambda each: each[0].digest))
        for package, own in edits.items()
    }
    while queues:
        for package, queue in list(queues.items()):
            mutant = next(filter(None, (_mutant(package, trees[c[1]], *c) for c in queue)), None)
            if mutant is None or made[package] == count:
                del queues[package]
            elif mutant.key not in known:
                known.add(mutant.key)
                made[package] += 1
                yield mutant


def _mutant(package: str, tree: cst.Module, edit: _Edit, file: Path, module: str) -> Mutant | None:
    """The mutant, or None where its code cannot take the place of the original's."""
    changed = tree.visit(_Replacement(edit))
    function = edit.function.visit(_Replacement(edit))
    assert isinstance(changed, cst.Module)
    assert isinstance(function, cst.FunctionDef)
    diff = difflib.unified_diff(
        _code(edit.function).strip("\n").splitlines(),
        _code(function).strip("\n").splitlines(),
        n=_CONTEXT,
        lineterm="",
    )
    text = "\n".join(line for line in diff if not line.startswith(("---", "+++", "@@")))
    try:
        new = codes(changed.code, file)
    except SyntaxError:
        return None
    old = codes(tree.code, file)
    has_replaced = any(
        name in new and new[name] != code and new[name].co_freevars == code.co_freevars
        for name, code in old.items()
    )
    if not text or not has_replaced:
        return None
    return Mutant(
        package=package,
        module=module,
        function=edit.name,
        diff=text,
        file=file,
        module_source=changed.code,
    )


def codes(source: str, file: Path) -> dict[tuple[str, int], CodeType]:
    """The code of each function and method of a module, by qualified name and first line."""
    found = {}
    waiting = [compile(source, str(file), "exec", dont_inherit=True)]
    while waiting:
        for constant in waiting.pop().co_consts:
            if isinstance(constant, CodeType) and "<locals>" not in constant.co_qualname:
                found[constant.co_qualname, constant.co_firstlineno] = constant
                waiting.append(constant)
    return found


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)
