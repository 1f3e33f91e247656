"""Z106: buffers that may be live at the same time share no byte, and every temporary buffer has a valid offset."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.memory.test_placement import meetings
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.ir.text import parse
from zeroir.memory.placement import Placement, place_all
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.verify import verify

SCHEDULED = applied(mlp(blocks=3), (*for_stage(3, 2), PlanMemory()))


def moved(program: Program, name: str, offset: int | None) -> Program:
    buffers = tuple(replace(b, offset=offset) if b.name == name else b for b in program.buffers)
    return replace(program, buffers=buffers)


def test_it_agrees_with_a_judge_that_compares_every_pair() -> None:
    """With random offsets, the verifier reports exactly the plans in which two live buffers may overlap."""
    chance = random.Random(0)
    temporary = [b for b in SCHEDULED.buffers if b.offset is not None]
    size = place_all(SCHEDULED)[Space.DEVICE].size_bytes
    verdicts: list[bool] = []
    for _ in range(40):
        program = SCHEDULED
        for buffer in chance.sample(temporary, chance.randrange(1, 3)):
            program = moved(program, buffer.name, chance.randrange(0, 2 * size, 64))
        offsets = {b.name: b.offset for b in program.buffers if b.offset is not None}
        is_apart = not list(meetings(program, Placement(offsets=offsets, size_bytes=0)))
        assert codes(program) == (set() if is_apart else {"Z106"})
        verdicts.append(is_apart)
    assert len(set(verdicts)) == 2


TEXT = """zeroir 1
mesh dp=1
streams compute:device gather:device
buffer %x : f32[1] device scalar = value x
buffer %y : f32[128] device activation offset=0
buffer %z : f32[64] device activation offset=256

section evaluate {
  alloc %y  stream=compute
  !0 = release %y  stream=compute
  wait !0  on=gather
  alloc %z  stream=gather
  release %z  stream=gather
}
"""


def found(text: str) -> set[str]:
    """The laws that the program breaks, but for that of the update, which it has not."""
    return codes(parse(text)) - {"Z403"}


def test_an_event_makes_room() -> None:
    assert found(TEXT) == set()
    together = TEXT.replace("  wait !0  on=gather\n", "").replace("!0 = ", "")
    assert found(together) == {"Z106"}
    assert found(together.replace("offset=256", "offset=512")) == set()


BOUNDARY = """zeroir 1
mesh dp=1
streams compute:device gather:device
buffer %x : f32[1] device scalar = value x
buffer %y : f32[64] device activation offset=0
buffer %z : f32[64] device activation offset=0

section last_micro_step {
  alloc %y  stream=gather
  !0 = release %y  stream=gather
  exit pending !0 stream=gather
}

section update {
  entry pending !0 stream=gather
  wait !0  on=compute
  alloc %z  stream=compute
  release %z  stream=compute
}
"""


def test_a_release_that_is_pending_at_a_boundary_still_holds_its_bytes() -> None:
    assert found(BOUNDARY) == set()
    early = BOUNDARY.replace("  wait !0  on=compute\n  alloc %z", "  alloc %z")
    late = early.replace(
        "  release %z  stream=compute\n", "  release %z  stream=compute\n  wait !0  on=compute\n"
    )
    assert "Z106" in found(late)
    # And placement knows: without offsets, the two get places of their own.
    bare = parse(late.replace(" offset=0", ""))
    assert place_all(bare)[Space.DEVICE].size_bytes == 1024


ON_ONE_STREAM = """zeroir 1
mesh dp=1
streams compute:device gather:device
buffer %x : f32[1] device scalar = value x
buffer %y : f32[64] device activation offset=0
buffer %z : f32[64] device activation offset=0

section last_micro_step {
  alloc %y  stream=gather
  !0 = release %y  stream=gather
  alloc %z  stream=gather
  !1 = release %z  stream=gather
  exit pending !0 stream=gather
  exit pending !1 stream=gather
}

section update {
  entry pending !0 stream=gather
  entry pending !1 stream=gather
}
"""


def test_what_crosses_a_boundary_on_one_stream_may_have_shared_its_bytes() -> None:
    def places(text: str) -> Mapping[str, int]:
        return place_all(parse(text.replace(" offset=0", "")))[Space.DEVICE].offsets

    assert found(ON_ONE_STREAM) == set()
    # Where both are live at once, their own section says so.
    at_once = ON_ONE_STREAM.replace("  !0 = release %y  stream=gather\n", "", 1).replace(
        "  !1 = release %z", "  !0 = release %y  stream=gather\n  !1 = release %z"
    )
    assert "Z106" in found(at_once)
    assert places(ON_ONE_STREAM) == {"y": 0, "z": 0}
    assert places(at_once) == {"y": 0, "z": 512}
    # On two streams neither release stands for the other.
    apart = ON_ONE_STREAM.replace(
        "  alloc %z  stream=gather\n  !1 = release %z  stream=gather",
        "  wait !0  on=compute\n  alloc %z  stream=compute\n  !1 = release %z  stream=compute",
    ).replace("pending !1 stream=gather", "pending !1 stream=compute")
    assert "Z106" in found(apart)
    assert places(apart) == {"y": 0, "z": 512}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("offset=256", "offset=258", "not a multiple"),
        ("offset=256", "offset=-4", "not a multiple"),
        (" offset=256", "", "no offset"),
        ("scalar = value x", "scalar offset=1024 = value x", "only temporary buffers"),
    ],
)
def test_a_plan_is_whole_and_well_formed(old: str, new: str, words: str) -> None:
    (finding,) = verify(parse(TEXT.replace(old, new))).findings
    assert finding.code == "Z008"
    assert words in finding.sentence
