"""The golden chain: a small program before the first pass and after each pass in turn, as files in ``golden``.

Each file is valid and is what its pass makes of the file before it. The docstring of each pass shows an excerpt of
what changes between the two; a line that ends in ``…`` shows only its beginning. Numbers of ops are left out of the
files, so that an op that moves changes no other line.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.passes.example_programs import ACCUMULATING, AWAY, CLIPPED, KEEPING, LOGICAL, SAVING
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.communication.bucket import Bucket
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.communication.unshard import Unshard
from zeroir.passes.communication.widen_reductions import WidenReductions
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.recompute import Recompute
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.memory.select_saved import SelectSaved
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.passes.offload.overlap_uploads import OverlapUploads
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import PASSES, parse_spec

GOLDEN: Final = Path(__file__).parent / "golden"
# One live gradient, so that two units are enough to see the bound.
CHAIN: Final = for_stage(3, 4, replicas=2, live=1)
LONGEST_EXCERPT: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A pass, and the program on which it runs: a logical one after earlier passes."""

    logical: Program
    earlier: tuple[Pass, ...] = ()
    step: Pass

    @property
    def before(self) -> Program:
        return applied(self.logical, self.earlier)

    @property
    def path(self) -> Path:
        """The file of the program after the pass."""
        return GOLDEN / f"{len(self.earlier) + 1}-{self.step.name}.zir"


LINKS: Final = (
    *(Link(logical=LOGICAL, earlier=CHAIN[:at], step=step) for at, step in enumerate(CHAIN)),
    # Passes that a user may ask for, where they stand then.
    Link(logical=SAVING, step=SelectSaved()),
    Link(logical=KEEPING, step=Recompute(units=("a",))),
    Link(logical=ACCUMULATING, step=OrderByLayer(micro_batches=2, whole_step=True)),
    Link(logical=LOGICAL, earlier=CHAIN[:5], step=Unshard(units=("a",))),
    Link(logical=LOGICAL, earlier=CHAIN[:6], step=Bucket(bytes=4096)),
    Link(logical=LOGICAL, earlier=CHAIN[:8], step=OverlapUpdate()),
    Link(
        logical=LOGICAL, earlier=CHAIN[:1], step=PageOptimizer(device_bytes=2048, page_bytes=1024)
    ),
    Link(logical=LOGICAL, earlier=CHAIN[:8], step=OffloadOptimizer()),
    Link(logical=LOGICAL, earlier=CHAIN[:8], step=OffloadGradients()),
    Link(logical=LOGICAL, earlier=CHAIN[:8], step=OffloadParameters()),
    Link(
        logical=CLIPPED,
        earlier=(*CHAIN[:8], OffloadOptimizer(), OffloadGradients()),
        step=SpeculateUpdate(),
    ),
    Link(logical=AWAY, step=OffloadActivations(units=("a",), smallest=0)),
    Link(logical=LOGICAL, earlier=(*CHAIN[:8], OffloadOptimizer()), step=OffloadToDisk()),
    Link(logical=LOGICAL, earlier=(*CHAIN[:8], OffloadOptimizer()), step=OverlapUploads()),
    Link(logical=mlp(blocks=1, precision="bf16"), earlier=CHAIN[:3], step=WidenReductions()),
    Link(logical=LOGICAL, earlier=CHAIN[:8], step=SaveState()),
    Link(logical=LOGICAL, earlier=CHAIN[:8], step=PlanMemory()),
)
EACH_LINK: Final = pytest.mark.parametrize("link", LINKS, ids=[link.step.name for link in LINKS])


def _text(program: Program) -> str:
    """The program as its golden file has it: without comments, alignment and the numbers of ops."""
    lines = (line.split("//")[0].rstrip() for line in print_program(program).splitlines())
    unnumbered = (re.sub(r"^ +\d+: ", "  ", line) for line in lines)
    return "".join(re.sub(r"(?<=\S) {2,}", "  ", line) + "\n" for line in unnumbered if line)


def _differences(before: str, after: str) -> list[str]:
    """Every line of both texts after its sign, ``+``, ``-`` or a space; without the indentation."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] != "?"]


def _excerpt(step: Pass) -> tuple[str, list[str]]:
    """The spec and the lines of the excerpt that a pass's docstring gives, written as ``_differences`` does."""
    documentation = inspect.getdoc(inspect.getmodule(type(step))) or ""
    match = re.search(r"^What ``(.*)`` changes::\n\n(.*)", documentation, re.S | re.M)
    assert match, f"the docstring of {step.name} has no excerpt"
    lines = textwrap.dedent(match[2]).rstrip().splitlines()
    return match[1], [f"{line[0]} {line[1:].strip()}" for line in lines]


def _is_shown(line: str, excerpt: str) -> bool:
    return line.startswith(excerpt[:-1]) if excerpt.endswith("…") else line == excerpt


def _missing(excerpt: list[str], differences: list[str]) -> Iterator[str]:
    """The lines of an excerpt that the differences do not have, in the same order."""
    at = 0
    for shown in excerpt:
        following = (n for n, line in enumerate(differences[at:], at) if _is_shown(line, shown))
        place = next(following, None)
        if place is None:
            yield shown
        else:
            at = place + 1


@EACH_LINK
def test_each_file_is_what_its_pass_makes_of_the_file_before_it(
    link: Link, update_golden: bool
) -> None:
    after = manager.run(link.before, [link.step], reference=link.logical)
    if update_golden:
        link.path.write_text(_text(after), "utf-8")
    golden = link.path.read_text("utf-8")
    assert golden == _text(after), "look at the change; --update-golden accepts it"
    assert parse(golden) == after


@EACH_LINK
def test_the_excerpt_of_each_docstring_is_what_changes(link: Link) -> None:
    spec, excerpt = _excerpt(link.step)
    assert parse_spec(spec) == link.step
    differences = _differences(_text(link.before), link.path.read_text("utf-8"))
    assert not list(_missing(excerpt, differences))
    assert any(line[0] in "+-" for line in excerpt)
    assert len(excerpt) <= LONGEST_EXCERPT


def test_an_excerpt_that_is_not_so_is_told() -> None:
    differences = ["  alloc %a", "+ wait !0 on=gather", "  release %a"]
    assert not list(_missing(["  alloc %a", "+ wait …", "  release %a"], differences))
    for wrong in ("- wait !0 on=gather", "+ wait !1 …", "+ alloc %a"):
        assert list(_missing([wrong], differences)) == [wrong]
    assert list(_missing(["  release %a", "  alloc %a"], differences)) == ["  alloc %a"]


def test_every_pass_is_shown_and_every_file_is_read() -> None:
    assert {type(link.step) for link in LINKS} == set(PASSES)
    assert {link.path for link in LINKS} == set(GOLDEN.glob("*.zir"))
