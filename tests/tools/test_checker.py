"""The second checker agrees with the verifier about valid and damaged programs, and imports nothing of zeroir."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.support.artifacts import artifact_of
from tests.support.mutate import MUTATIONS
from tests.support.subjects import CAPTURED, NAMES, subject
from tests.verify.test_dims import compiled as with_dims
from tests.verify.test_dims import damages as damaged_sizes
from tools.checker.dims import FIRST_SIZE, instances
from tools.checker.reading import FileRecord, NoProgramError, read_bytes
from tools.compare_checkers import OUTCOMES, judged, second_findings
from zeroir.artifact.file import Artifact, save, to_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.text import parse, print_program
from zeroir.verify import Reference, verify

QUICK = [name for name in NAMES if name not in CAPTURED]
STRICTER = {"drop-write-back", "fill-part", "half-transfer", "rename-events", "skip-page-in"}
"""Damages whose kind alone may change nothing where the elements are padding, which the verifier refuses."""


def artifact(name: str) -> Artifact:
    return artifact_of(subject(name).scheduled, subject(name).logical)


@pytest.mark.parametrize("name", QUICK)
def test_a_valid_program_is_accepted(name: str) -> None:
    assert second_findings(subject(name).logical, subject(name).scheduled) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CAPTURED))
def test_a_valid_captured_program_is_accepted(name: str) -> None:
    assert second_findings(subject(name).logical, subject(name).scheduled) == []


def check_agreement(name: str, seed: int) -> None:
    made, chance = subject(name), Random(f"{name} {seed}")
    for kind in chance.choices(sorted(MUTATIONS), k=100):
        mutant = MUTATIONS[kind](made.scheduled, chance)
        if mutant is not None and mutant != made.scheduled:
            break
    else:
        return
    verdict = judged(name, seed, mutant, kind, Reference(made.logical))
    agreed = {OUTCOMES[0], OUTCOMES[1]}
    if kind in STRICTER:
        agreed.add(OUTCOMES[2])
    assert verdict.outcome in agreed, f"{name} {seed} {kind}: {verdict.outcome}: {verdict.why}"


@pytest.mark.parametrize("name", QUICK)
def test_both_agree_about_damaged_programs(name: str) -> None:
    for seed in range(2):
        check_agreement(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_both_agree_about_many_damaged_programs(name: str) -> None:
    for seed in range(2, 12):
        check_agreement(name, seed)


DETOUR = """\
  alloc %detour  stream=reduce
  cast %root.pre.grad_sum -> %detour  stream=reduce
  cast %detour -> %root.pre.grad_sum  stream=reduce
  release %detour  stream=reduce
"""


def with_rounded_sums(text: str) -> str:
    """Round a sum to 16 bits before each micro-step adds to it, which changes nothing before the third."""
    text = text.replace("input x", "buffer %detour : bf16[256] device grad\ninput x", 1)
    place = text.index("release %root.pre.grad_full", text.index("section micro_step"))
    end = text.index("\n", place) + 1
    return text[:end] + DETOUR + text[end:]


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("stage 2, weighted", with_rounded_sums),
        (
            "stage 1, speculative",
            lambda text: text.replace(
                "param blocks.1 @dp version=1", "param blocks.1 @dp version=2"
            ),
        ),
    ],
)
def test_both_refuse_what_the_second_one_once_accepted(
    name: str, damaged: Callable[[str], str]
) -> None:
    made = subject(name)
    mutant = parse(damaged(print_program(made.scheduled)))
    assert mutant != made.scheduled
    assert not verify(mutant, Reference(made.logical)).is_valid
    assert second_findings(made.logical, mutant)


@pytest.mark.slow
def test_both_agree_about_sizes_of_programs_with_dims() -> None:
    scheduled, logical = with_dims("stage 3")
    assert second_findings(logical, scheduled) == []
    for what, mutant in damaged_sizes(scheduled, seed=0):
        is_valid = verify(mutant, Reference(logical)).is_valid
        assert (second_findings(logical, mutant) == []) == is_valid, what


def test_a_size_of_several_dims_is_a_number_at_each_value_of_them() -> None:
    dims = [
        FileRecord("Dim", {"name": n, "minimum": 1, "maximum": m}) for n, m in (("a", 9), ("b", 4))
    ]
    program = FileRecord(
        "Program",
        {
            "dims": tuple(dims),
            "sizes": ("a^2*b-1", "((b+1)//2)"),
            "of": (7, FIRST_SIZE, FIRST_SIZE - 1),
        },
    )
    assert [instance.of for instance in instances(program)] == [(7, 323, 2), (7, 0, 1), (7, 26, 2)]


@pytest.mark.parametrize("size", ["a/2", "c", "a^65", "f(a)", "a+", "a.real"])
def test_a_size_that_is_no_polynomial_is_refused(size: str) -> None:
    dims = (FileRecord("Dim", {"name": "a", "minimum": 1, "maximum": 9}),)
    with pytest.raises(NoProgramError, match="no polynomial"):
        list(instances(FileRecord("Program", {"dims": dims, "sizes": (size,)})))


@pytest.mark.slow
def test_both_refuse_more_seeds_than_the_logical_program_draws() -> None:
    made = subject("captured, stage 2")
    buffers = tuple(
        replace(b, numel=b.numel + 1) if b.role is Role.RNG else b for b in made.scheduled.buffers
    )
    mutant = replace(made.scheduled, buffers=buffers)
    assert not verify(mutant, Reference(made.logical)).is_valid
    assert second_findings(made.logical, mutant)


def test_it_imports_nothing_of_zeroir() -> None:
    own = {"tools", "msgpack"}
    for path in Path("tools/checker").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in own | sys.stdlib_module_names, f"{path} imports {name}"
                assert top != "tools" or name.startswith("tools.checker")


def run(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.checker", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_says_what_it_finds(tmp_path: Path) -> None:
    made = artifact("stage 3, overlapped")
    valid, damaged, other = tmp_path / "a.zir", tmp_path / "b.zir", tmp_path / "c.zir"
    save(made, valid)
    mutant = MUTATIONS["drop-release"](made.scheduled, Random(0))
    assert mutant is not None
    save(artifact_of(mutant, made.logical), damaged)
    other.write_text("no program")
    assert (run(valid).returncode, run(valid).stdout) == (0, f"{valid}: ok\n")
    found = run(damaged)
    assert found.returncode == 1
    assert "live" in found.stdout
    refused = run(other)
    assert refused.returncode == 2
    assert refused.stderr == f"'{other}' is no compiled program.\n"


def test_a_file_with_one_byte_changed_is_refused() -> None:
    data = bytearray(to_bytes(artifact("stage 0")))
    data[-1] ^= 1
    with pytest.raises(Exception, match="does not match its SHA-256"):
        read_bytes(bytes(data))
