"""What the user's code stores is written by each micro-step, from this rank's batch, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.support.edits import with_body, without_save
from tests.support.lowering import codes as broken_laws
from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Pending,
    Program,
    State,
)
from zeroir.ir.reports import Quantity, Storing
from zeroir.ir.text import parse, print_program
from zeroir.verify import verify


class Net(nn.Module):
    """Stores what its layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        z = self.second(y)
        self.seen["y"], self.seen["z"] = y.detach(), z.detach()
        loss: Tensor = z.square().mean()
        return loss


@lru_cache
def programs() -> tuple[Program, Program]:
    """The scheduled and the logical program."""
    compiled = zeroir.compile(
        Net(), torch.zeros(3, 4), stage=3, world_size=3, micro_steps=2, units="first,second"
    )
    return without_save(compiled.program), compiled.logical


def codes(program: Program) -> set[str]:
    return broken_laws(program, programs()[1])


def appended(program: Program, name: str, *added: Op) -> Program:
    return with_body(program, name, (*program.section_by_name[name].body, *added))


def test_it_is_proved_prints_and_parses() -> None:
    program, _ = programs()
    assert codes(program) == set()
    text = print_program(program)
    assert parse(text) == program
    assert "output \"seen['y']\" : f32[3,4] <- %stored.seen.y stored=step\n" in text


@pytest.mark.parametrize("section", [UPDATE, EVALUATE])
def test_only_micro_steps_write_what_is_stored_in_them(section: str) -> None:
    program, _ = programs()
    region = whole(program.buffer_by_name["stored.seen.y"])
    fill = ops.Fill(destination=region, value=2.0, stream=COMPUTE)
    assert codes(appended(program, section, fill)) == {"Z103"}


@pytest.mark.parametrize("section", [MICRO_STEP, LAST_MICRO_STEP])
def test_each_micro_step_writes_it_and_micro_steps_write_no_other(section: str) -> None:
    program, _ = programs()
    assert "Z103" in codes(_dropped(program, section))
    region = whole(program.buffer_by_name["evaluation.stored.seen.y"])
    fill = ops.Fill(destination=region, value=2.0, stream=COMPUTE)
    assert codes(appended(program, section, fill)) == {"Z103"}


def _dropped(program: Program, section: str) -> Program:
    """The call that computes it keeps it to itself."""
    for line, op in enumerate(program.section_by_name[section].body):
        if not isinstance(op, ops.Compute):
            continue
        kept = tuple(
            None if d is not None and d.view.region.buffer == "stored.seen.y" else d
            for d in op.destinations
        )
        if kept != op.destinations:
            body = list(program.section_by_name[section].body)
            body[line] = replace(op, destinations=kept)
            return with_body(program, section, tuple(body))
    raise AssertionError("no call computes it")


def test_it_is_of_one_rank() -> None:
    program, _ = programs()
    region = whole(program.buffer_by_name["stored.seen.y"])
    reduce = next(op for op in program.ops() if isinstance(op, ops.ReduceScatter))
    signal = ops.Cast(source=region, destination=region, stream=COMPUTE, event="stored")
    wait = ops.Wait(waited="stored", on=reduce.stream)
    pairs = (ops.Pair(source=region, destination=region),)
    summed = ops.AllReduce(pairs=pairs, comm=reduce.comm, stream=reduce.stream)
    assert codes(appended(program, MICRO_STEP, signal, wait, summed)) == {"Z402"}


def _with(index: int, **changes: object) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        outputs = list(program.outputs)
        outputs[index] = replace(outputs[index], **changes)  # type: ignore[arg-type]
        return replace(program, outputs=tuple(outputs))

    return change


CHANGES: dict[str, tuple[Callable[[Program], Program], str]] = {
    "two are swapped": (
        lambda p: _with(0, path=p.outputs[1].path)(_with(1, path=p.outputs[0].path)(p)),
        "Z406",
    ),
    "one is left out": (lambda p: replace(p, outputs=p.outputs[1:]), "Z008"),
    "one is stored twice": (lambda p: _with(1, path=p.outputs[0].path)(p), "Z002"),
    "one is that of an evaluation": (_with(0, path="x", stored=Storing.EVALUATION), "Z103"),
    "one is returned": (_with(0, stored=None), "Z008"),
    "one has another shape": (_with(0, shape=(4, 4)), "Z008"),
    "one has another buffer": (_with(0, buffer="stored.seen.z"), "Z002"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_outputs_are_rejected(name: str) -> None:
    change, code = CHANGES[name]
    assert code in codes(change(programs()[0]))


def test_it_is_not_under_way_when_the_host_reads_it() -> None:
    program, _ = programs()
    section = program.section_by_name[MICRO_STEP]
    region = Region(buffer="stored.seen.y", offset=0, numel=1)
    late = ops.Cast(source=region, destination=region, stream=COMPUTE, event="late")
    pending = State(pending=(Pending(event="late", stream=COMPUTE),))
    leaving = replace(section, entry=pending, body=(*section.body, late), exit=pending)
    report = verify(
        replace(
            program,
            sections=(leaving,),
            buffers=tuple(b for b in program.buffers if not b.name.startswith("evaluation.")),
            outputs=tuple(each for each in program.outputs if each.is_of_steps),
            reports=tuple(r for r in program.reports if r.quantity is not Quantity.EVAL_LOSS),
        )
    )
    assert any(
        finding.code == "Z105" and "which the host reads after the section" in finding.sentence
        for finding in report.findings
    )
