"""Who may import whom, as `pyproject.toml` states it, and what the verifier shares with what it proves."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

import networkx

from tests.support.sources import nodes
from tests.support.subjects import subject
from tests.verify.test_dims import SECTION
from zeroir.artifact import load
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import Program
from zeroir.ir.text import parse
from zeroir.verify import verify
from zeroir.verify.report import Report

ROOT = Path(__file__).parents[2]


def test_imports_follow_the_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_folder_holds_too_many_modules() -> None:
    files = (path for path in product_modules().values() if path.name != "__init__.py")
    counts = Counter(path.parent for path in files)
    assert {folder: count for folder, count in counts.items() if count > 25} == {}


def test_no_imports_form_a_circle() -> None:
    """Imports within functions and those for type checkers count, too; those of a package's lazy names do not."""
    modules = product_modules()
    graph = networkx.DiGraph(
        (name, imported)
        for name, path in modules.items()
        if name != "zeroir"
        for imported in imported_modules(path, modules)
    )
    assert graph.number_of_edges() > len(modules)
    assert [
        circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1
    ] == []


def product_modules() -> dict[str, Path]:
    """The files of the product by the names of their modules; ``passes`` and ``runtime`` are symbolic links."""
    modules: dict[str, Path] = {}
    for top in ("zeroir", "zeroir/passes", "zeroir/runtime"):
        for path in (ROOT / top).resolve().rglob("*.py"):
            inside = path.relative_to((ROOT / top).resolve()).with_suffix("")
            parts = [part for part in (*Path(top).parts, *inside.parts) if part != "__init__"]
            modules[".".join(parts)] = path
    return modules


def imported_modules(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the product that a file imports anywhere in its text."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


DEFINITIONS = {
    "zeroir.ir.segments.allowlist": "which operators are pure",
    "zeroir.ir.analysis.instances": "what a program is for batches of one shape",
    "zeroir.ir.buffers": "which elements a region names",
    "zeroir.ir.contents": "what a region can hold",
    "zeroir.ir.dtypes": "what an element type is",
    "zeroir.ir.analysis.effects": "what an op reads and writes, as its fields declare it",
    "zeroir.ir.eight_bit_states": "how many elements share a scale",
    "zeroir.ir.fields": "which names a record declares and refers to",
    "zeroir.ir.limits": "how large a program may be",
    "zeroir.ir.mesh": "how many ranks an axis has",
    "zeroir.ir.segments.operators": "which operators of libraries a segment may call",
    "zeroir.ir.ops": "which ops there are",
    "zeroir.ir.options": "which texts a program has of its options",
    "zeroir.ir.optimizers": "which states and settings an optimizer has",
    "zeroir.ir.own_coordinates": "how many elements a state of whole parameters has",
    "zeroir.ir.output_paths": "what the path of an output means",
    "zeroir.ir.program": "which names a program declares",
    "zeroir.ir.reports": "what the engine reads",
    "zeroir.ir.segments.segment": "which values a segment has",
    "zeroir.ir.size_bounds": "how small and how large a size may be",
    "zeroir.ir.sizes": "which number a size is",
    "zeroir.ir.update_ops": "which states and settings an optimizer step names",
    "zeroir.ir.segments.views": "which elements the result of a view has",
}
"""The meaning of a program, which passes, verifier and engine share: a fault there makes all of them err alike.

So something else must notice it: ``tests/verify/test_shared_faults.py`` for effects, and comparisons with torch for
views, for the purity of operators, and for what optimizers compute of their states.
"""

SHARED_NAMES = {
    "zeroir.errors": {"UserError"},
    "zeroir.ir.bounds": {"AheadBound", "BehindBound", "Bound", "BoundKind", "LiveBound"},
    # For the sentences of findings.
    "zeroir.ir.text.names": {"Names"},
    "zeroir.ir.text.op_lines": {"op_text"},
    # For Z301 alone: the budget is compared with what the memory model predicts, and tests compare that with a device.
    "zeroir.memory.footprint": {"footprint"},
}
"""What the verifier imports beside the definitions."""


def test_the_verifier_imports_definitions_and_little_else() -> None:
    imported: dict[str, set[str]] = {}
    for file in sorted((ROOT / "zeroir/verify").rglob("*.py")):
        for node in nodes(file):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("zeroir") for alias in node.names), file
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                prefix = "zeroir.ir." if node.module == "zeroir.ir" else ""
                for alias in node.names:
                    module = prefix + alias.name if prefix else node.module
                    imported.setdefault(module, set()).add(alias.name)
                    is_memory = module.startswith("zeroir.memory")
                    assert not is_memory or file.name == "budget.py", file
    outside = {name for name in imported if name.startswith("zeroir.")}
    beside = {name for name in outside if not name.startswith("zeroir.verify")}
    others = {name: imported[name] for name in beside if not is_definition(name)}
    assert others == SHARED_NAMES


def is_definition(module: str) -> bool:
    return any(f"{module}.".startswith(f"{known}.") for known in DEFINITIONS)


def called(prove: Callable[[], Report]) -> dict[str, set[str]]:
    """The functions of zeroir that a proof calls outside the verifier, also as properties, by module."""
    functions: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("zeroir.") and "zeroir.verify" not in module:
            functions.setdefault(module, set()).add(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        report = prove()
    finally:
        sys.setprofile(before)
    assert report.is_valid, report.render()
    return functions


def as_written(program: Program) -> Program:
    return replace(program, options=WrittenOptions.of(program.options.texts))


def test_options_only_say_what_a_file_has_of_them() -> None:
    made = load(next((ROOT / "tests/data").glob("schema_*.zir")))
    functions = called(lambda: verify(replace(made.scheduled), replace(made.logical)))
    others = {module: functions[module] for module in functions if not is_definition(module)}
    assert others == {"zeroir.config.options": {"CompileOptions.pairs"}}


def test_a_proof_calls_nothing_else_that_passes_or_engine_have_derived() -> None:
    names = (
        "stage 2, 8 bits",
        "stage 2, whole parameters",
        "stage 3",
        "stage 1, speculative",
        "stage 3, paged",
        "stage 3, unit by unit",
    )
    programs = [(made.scheduled, made.logical) for made in map(subject, names)]
    stored = load(next((ROOT / "tests/data").glob("schema_*.zir")))
    programs += [(stored.scheduled, stored.logical), (parse(SECTION), parse(SECTION))]
    functions: dict[str, set[str]] = {}
    for program, reference in programs:
        # Copies have not computed any of their properties yet, and have options as a file has them.
        fresh, logical = as_written(program), as_written(reference)
        for module, names_of in called(lambda: verify(fresh, logical)).items():  # noqa: B023
            functions.setdefault(module, set()).update(names_of)
    others = {module for module in functions if not is_definition(module)}
    assert others == set()
    # Passes and engine derive these. Program.at_rest is a claim about the engine, which takes elements of a
    # copy for those at rest, and Z403 compares them with the values.
    assert not functions["zeroir.ir.program"] & {"Program.counters", "Program.streams_off_device"}
    assert "Program.at_rest" in functions["zeroir.ir.program"]
