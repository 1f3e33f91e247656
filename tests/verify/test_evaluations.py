"""What an evaluation may change: its own loss and outputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from tests.support.captures import captured
from tests.support.edits import put, the, with_body, with_report_of, without_save
from tests.support.evaluating import model as source
from tests.support.lowering import codes as broken_laws
from zeroir.config import make_options
from zeroir.frontend.lowering.tracing import program_of
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, UPDATE, Pending, Program, State
from zeroir.ir.reports import Quantity
from zeroir.ir.text import parse, print_program
from zeroir.passes.pipelines import lower
from zeroir.verify import verify

OPTIONS = make_options({"stage": 3, "world_size": 3})


@lru_cache
def programs() -> tuple[Program, Program]:
    """The scheduled and the logical program."""
    file = load_model_file(str(source.__file__))
    logical = program_of(captured(file, "fp32", ()), OPTIONS)
    return lower(logical, OPTIONS), logical


def appended(program: Program, name: str, *added: Op) -> Program:
    return with_body(program, name, (*program.section_by_name[name].body, *added))


def fill(program: Program, name: str) -> Op:
    return ops.Fill(destination=whole(program.buffer_by_name[name]), value=2.0, stream=COMPUTE)


def codes(program: Program) -> set[str]:
    return broken_laws(program, programs()[1])


@pytest.mark.slow
def test_it_is_proved_prints_and_parses() -> None:
    program, _ = programs()
    assert codes(program) == set()
    text = print_program(program)
    assert parse(text) == program
    assert "eval_loss %eval_loss\n" in text
    assert "output \"['logits']\" : f32[6,7] <- %output.logits\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "step", "lr", "buffer.blocks.0.norm.running_mean"])
def test_an_evaluation_changes_no_state(name: str) -> None:
    program = without_save(programs()[0])
    assert codes(appended(program, EVALUATE, fill(program, name))) & {"Z103", "Z405"}


@pytest.mark.slow
@pytest.mark.parametrize("section", [LAST_MICRO_STEP, UPDATE])
@pytest.mark.parametrize("name", ["eval_loss", "output.logits"])
def test_nothing_but_an_evaluation_writes_its_results(section: str, name: str) -> None:
    program, _ = programs()
    assert codes(appended(program, section, fill(program, name))) == {"Z103"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"), [("eval_loss", "Z408"), ("output.logits", "Z402"), ("output.loss", "Z402")]
)
def test_results_are_of_one_rank(name: str, code: str) -> None:
    """A sum over ranks would go unnoticed by the comparison with the logical program."""
    program, _ = programs()
    region = whole(program.buffer_by_name[name])
    reduce = next(op for op in program.ops() if isinstance(op, ops.ReduceScatter))
    wait = ops.Wait(waited="results", on=reduce.stream)
    pairs = (ops.Pair(source=region, destination=region),)
    summed = ops.AllReduce(pairs=pairs, comm=reduce.comm, stream=reduce.stream)
    place, last = the(program, ops.Compute, EVALUATE, -1)
    signalling = put(program, place, replace(last, event="results"))
    assert codes(appended(signalling, EVALUATE, wait, summed)) == {code}


def _dropped(program: Program) -> Program:
    """The last call keeps its outputs to itself."""
    place, call = the(program, ops.Compute, EVALUATE, -1)
    destinations = tuple(
        None if d is not None and d.view.region.buffer == "output.logits" else d
        for d in call.destinations
    )
    return put(program, place, replace(call, destinations=destinations))


def _other_output(program: Program) -> Program:
    first, second, *rest = program.outputs
    swapped = (replace(first, path=second.path), replace(second, path=first.path), *rest)
    return replace(program, outputs=swapped)


CHANGES: dict[str, tuple[Callable[[Program], Program], str]] = {
    "an output is not written": (_dropped, "Z103"),
    "two outputs are swapped": (_other_output, "Z406"),
    "an output is left out": (lambda p: replace(p, outputs=p.outputs[1:]), "Z008"),
    "the loss is that of a step": (lambda p: with_report_of(p, Quantity.EVAL_LOSS, "loss"), "Z008"),
    "the loss is no scalar": (
        lambda p: with_report_of(p, Quantity.EVAL_LOSS, "output.loss"),
        "Z008",
    ),
    "the loss is not declared": (lambda p: with_report_of(p, Quantity.EVAL_LOSS, "no"), "Z001"),
    "there is no evaluation": (
        lambda p: replace(p, sections=tuple(s for s in p.sections if s.name != EVALUATE)),
        "Z008",
    ),
    "paths contradict each other": (
        lambda p: replace(p, outputs=(replace(p.outputs[0], path="[0]"), *p.outputs[1:])),
        "Z008",
    ),
    "an output has another shape": (
        lambda p: replace(p, outputs=(replace(p.outputs[0], shape=(6, 6)), *p.outputs[1:])),
        "Z008",
    ),
    "an output is bound twice": (
        lambda p: replace(
            p, outputs=(replace(p.outputs[0], buffer=p.outputs[3].buffer), *p.outputs[1:])
        ),
        "Z002",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_evaluations_are_rejected(name: str) -> None:
    change, code = CHANGES[name]
    assert code in codes(change(programs()[0]))


def test_an_output_is_not_under_way_when_the_host_reads_it() -> None:
    program = without_save(programs()[0])
    section = program.section_by_name[EVALUATE]
    region = Region(buffer="output.loss", offset=0, numel=1)
    late = ops.Cast(source=region, destination=region, stream=COMPUTE, event="late")
    pending = State(pending=(Pending(event="late", stream=COMPUTE),))
    leaving = replace(section, entry=pending, body=(*section.body, late), exit=pending)
    report = verify(replace(program, sections=(leaving,)))
    assert any(
        finding.code == "Z105" and "which the host reads after the section" in finding.sentence
        for finding in report.findings
    )
