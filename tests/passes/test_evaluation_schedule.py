"""The schedule of an evaluation: each unit gathered once, ahead of its use, nothing kept, less memory than a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.support.captures import ROOT, captured
from tests.support.edits import with_body
from tests.support.lowering import applied, codes
from zeroir.config import CompileOptions, make_options
from zeroir.frontend.lowering.tracing import program_of
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, STEP_SECTIONS, Program, Section
from zeroir.memory.curve import peak
from zeroir.memory.footprint import footprint
from zeroir.passes import manager
from zeroir.passes.pipelines import for_options

GPT = ROOT / "examples" / "gpt.py"
MODELS = ROOT / "tests" / "support" / "models"


def logical(options: CompileOptions, path: str = str(GPT)) -> Program:
    return program_of(captured(load_model_file(path), options.precision.dtype, ()), options)


def scheduled(choices: Mapping[str, object], path: str = str(GPT)) -> Program:
    options = make_options({"stage": 3, "world_size": 4, **choices})
    return applied(logical(options, path), for_options(options))


def evaluation(program: Program) -> Section:
    return program.section_by_name[EVALUATE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [{}, {"bucket": 1 << 20}, {"mesh": "replicate=2,shard=2"}, {"unshard": "*"}, {"elide": False}],
    ids=str,
)
def test_each_flat_is_gathered_once(choices: dict[str, object]) -> None:
    program = scheduled(choices)
    gathered = Counter(
        pair.destination.buffer
        for op in evaluation(program).body
        if isinstance(op, ops.Gather)
        for pair in op.pairs
    )
    expected = Counter({f"{flat.name}.full": 1 for flat in program.flats})
    if choices.get("elide", True):
        expected["root.pre.full"] = 2  # The head is the embedding, which is not kept all the while.
    assert gathered == expected


@pytest.mark.slow
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_gathers_run_ahead_of_their_use(distance: int) -> None:
    body = evaluation(scheduled({"prefetch": distance})).body
    units = [op.unit for op in body if isinstance(op, ops.Compute)]
    computed = 0
    ahead: Counter[int] = Counter()
    for op in body:
        match op:
            case ops.Gather():
                (pair,) = op.pairs
                unit = pair.source.buffer.removesuffix(".param")
                if unit in units[computed:]:
                    ahead[units.index(unit) - computed] += 1
            case ops.Compute():
                computed += 1
            case _:
                pass
    # The first units cannot be gathered earlier than at the beginning.
    assert max(ahead) == distance
    assert ahead[distance] == len(units) - distance


@pytest.mark.slow
def test_nothing_is_kept() -> None:
    program = scheduled({})
    live: set[str] = set()
    most = 0
    for op in evaluation(program).body:
        match op:
            case ops.Alloc():
                live.add(op.buffer)
                assert program.buffer_by_name[op.buffer].role in (Role.GATHERED, Role.ACTIVATION)
            case ops.Release():
                live.remove(op.buffer)
            case _:
                pass
        most = max(most, len(live))
    assert not live
    # The gathered parameters of two units, of the embedding as well as the head, and what one computes from.
    assert most == 5


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "path",
    [
        str(GPT),
        *(
            pytest.param(str(MODELS / f"{name}.py"), marks=pytest.mark.slow)
            for name in ("convnet", "traps", "llama", "t5")
        ),
    ],
)
def test_it_takes_less_memory_than_a_step(path: str, stage: int) -> None:
    program = scheduled({"stage": stage}, path)
    step = peak(program, sections=STEP_SECTIONS).total_bytes
    assert peak(program, sections=(EVALUATE,)).total_bytes < step
    alone = scheduled({"stage": stage, "evaluate": False}, path)
    loss_bytes = program.buffer_by_name["eval_loss"].size_bytes
    assert footprint(program).total_bytes == footprint(alone).total_bytes + loss_bytes


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_the_figures_of_a_step_are_those_without_it(stage: int) -> None:
    with_it = scheduled({"stage": stage})
    without = scheduled({"stage": stage, "evaluate": False})
    for name in STEP_SECTIONS:
        assert with_it.section_by_name.get(name) == without.section_by_name.get(name)
    assert collective_bytes(with_it) == collective_bytes(without)
    assert list(with_it.step_ops()) == list(without.step_ops())


def calls(program: Program, section: str) -> list[tuple[str, str]]:
    """The units of a section's calls, and what they compute: passes may rename equal segments."""
    body = program.section_by_name[section].body
    return [
        (op.unit, program.segment_by_name[op.segment].digest())
        for op in body
        if isinstance(op, ops.Compute)
    ]


@pytest.mark.slow
def test_selecting_and_recomputing_leave_it_alone() -> None:
    options = make_options({"stage": 0, "world_size": 1, "recompute": "*"})
    program = logical(options)
    select, recompute = for_options(options)[:2]
    for step in (select, recompute):
        changed = step(program)
        assert calls(changed, EVALUATE) == calls(program, EVALUATE)
        assert calls(changed, LAST_MICRO_STEP) != calls(program, LAST_MICRO_STEP)
        program = changed


@pytest.mark.slow
def test_an_evaluation_of_other_values_breaks_a_law() -> None:
    options = make_options({"stage": 3, "world_size": 4})
    reference = logical(options)
    program = manager.run(reference, for_options(options))
    section = evaluation(program)
    at, compute = next(
        (at, op) for at, op in reversed([*enumerate(section.body)]) if isinstance(op, ops.Compute)
    )
    # The targets of the loss become its tokens.
    (targets,) = [a for a in compute.arguments if a.view.region.buffer == "input.1"]
    tokens = replace(
        targets, view=replace(targets.view, region=replace(targets.view.region, buffer="input.0"))
    )
    arguments = tuple(tokens if a == targets else a for a in compute.arguments)
    body = (*section.body[:at], replace(compute, arguments=arguments), *section.body[at + 1 :])
    assert codes(with_body(program, EVALUATE, body), reference) == {"Z406"}
