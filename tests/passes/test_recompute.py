"""Computing units once more: less is kept, no bit changes, nothing is drawn or counted twice, and it is proved anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.numbers import assert_equal, assert_same, inputs, run
from tests.passes.strategies import Case, cases
from tests.passes.trained_models import trained
from tests.passes.variants import called_twice
from tests.support.eager import traced
from tests.support.edits import put, the
from tests.support.examples import examples
from tests.support.lowering import applied, codes, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.frontend import load_model_file
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.buffers import Role
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.ir.text import parse, print_program
from zeroir.memory.curve import peak
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.common.min_cut import choose
from zeroir.passes.common.storages import Need, SegmentPair, Use
from zeroir.passes.memory.recompute import Recompute
from zeroir.passes.memory.select_saved import SelectSaved
from zeroir.passes.pipelines import lower
from zeroir.verify import verify

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "support" / "models"
GPT = ROOT / "examples" / "gpt.py"
ALL = Recompute(units=("*", "root.*"))
TEXT = (Path(__file__).parent / "kept.zir").read_text()


def edited(*changes: tuple[str, str]) -> Program:
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    program = parse(text)
    assert verify(program).findings == ()
    return program


def calls(program: Program) -> list[str]:
    body = program.section_by_name[LAST_MICRO_STEP].body
    return [op.segment for op in body if isinstance(op, ops.Compute)]


def saved(program: Program) -> set[str]:
    return {buffer.name for buffer in program.buffers if buffer.role is Role.SAVED}


def saved_bytes(program: Program) -> int:
    return sum(program.buffer_by_name[name].size_bytes for name in saved(program))


def assert_laws(logical: Program, step: Recompute) -> Program:
    program = step(logical)
    assert verify(program, logical).findings == ()
    assert step(logical) == program, "it is deterministic"
    assert step(program) == program, "it is idempotent"
    assert parse(print_program(program)) == program
    return program


# ---------------------------------------------------------------------------------------------------- made programs


ORDERS: tuple[tuple[Pass, ...], ...] = ((ALL,), (SelectSaved(), ALL), (ALL, SelectSaved()))


@examples(6)
@given(cases(world_sizes=(1, 3)), st.sampled_from(ORDERS), st.integers(0, 2**16))
def test_every_stage_computes_the_same_after_it(
    case: Case, before: tuple[Pass, ...], seed: int
) -> None:
    program = proved(case.logical(), (*before, *case.passes()))
    assert_same(program, applied(case.logical(), case.passes()), case.micro_steps, [seed])


@examples(12)
@given(cases(stages=(0,)))
def test_what_only_a_backward_reads_is_not_kept(case: Case) -> None:
    logical = case.logical()
    program = assert_laws(logical, ALL)
    blocks = range(case.blocks)
    assert {f"blocks.{i}.relu" for i in blocks} & saved(program) == set()
    assert {f"h.{i}" for i in blocks} <= saved(program)
    # The loss's own unit would be computed twice in a row.
    assert calls(program).count("post.forward") == 1
    assert calls(program).count("block.recompute") == case.blocks


def test_a_forward_is_issued_just_before_its_backward() -> None:
    program = Recompute()(mlp(blocks=2))
    assert calls(program) == [
        *("pre.forward", "block.forward", "block.forward", "post.forward", "post.backward"),
        *("block.recompute", "block.backward", "block.recompute", "block.backward"),
        "pre.backward",
    ]
    # It makes what the backward reads, and not the block's own result.
    again = program.segment_by_name["block.recompute"]
    assert [node.op for node in again.nodes][-1] == "aten.relu.default"
    assert len(again.outputs) == len(program.segment_by_name["block.forward"].outputs) == 1


def test_only_the_units_that_are_named() -> None:
    program = assert_laws(mlp(blocks=3), Recompute(units=("blocks.1",)))
    assert saved(program) >= {"blocks.0.relu", "blocks.2.relu"}
    assert calls(program).count("block.recompute") == 1
    assert {"block.forward", "block.forward.1"} <= program.segment_by_name.keys()
    some = Recompute(units=("blocks.[02]",))(mlp(blocks=3))
    assert saved(some) & {f"blocks.{i}.relu" for i in range(3)} == {"blocks.1.relu"}


def test_a_unit_that_is_called_twice_is_computed_again_call_by_call() -> None:
    logical = called_twice()
    program = assert_laws(logical, ALL)
    assert calls(program).count("block.recompute") == 3
    sharded = proved(logical, (ALL, *for_stage(3, 3)))
    assert_same(sharded, applied(logical, for_stage(3, 3)), seeds=[5])


@pytest.mark.parametrize(("elide", "tied"), [(True, False), (False, True)])
def test_the_gather_of_the_backward_serves_the_second_run(elide: bool, tied: bool) -> None:
    logical = mlp(blocks=2, tied=tied)
    passes = for_stage(3, 4, elide=elide)
    without = applied(logical, passes)
    program = applied(logical, (Recompute(), *passes))
    assert collective_bytes(program) == collective_bytes(without)
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    lives = happens.lives(body, program)
    for index, op in enumerate(body):
        if isinstance(op, ops.Compute) and op.segment == "block.recompute":
            (life,) = (life for life in lives if index in life.readers)
            assert masks[index] >> life.gather & 1
            # The backward reads the same copy.
            after = [body[reader] for reader in life.readers if reader > index]
            assert [call.segment for call in after if isinstance(call, ops.Compute)] == [
                "block.backward"
            ]


# ------------------------------------------------------------------------------------- several segments, other shapes

FORWARD = TEXT[TEXT.index("segment @a.forward") : TEXT.index("segment @b.forward")]
BACKWARD = TEXT[TEXT.index("segment @a.backward") : TEXT.index("section last_micro_step")]
CALL = "compute @a.forward(%x, w: %a.param[0:128]) -> (%h, %m)  unit=a stream=compute\n"
ONE = """\
segment @a.one($0: f32[4,16], $1: f32[16,8]) {
  $2 = aten.mm.default($0, $1) : f32[4,8]
  $3 = aten.mul.Tensor($2, 2.0) : f32[4,8]
  return ($2, $3)
}
"""
LAST = """\
segment @a.backward($0: f32[4,8], $1: f32[4,8], $2: f32[4,16], $3: f32[4,8]) {
  $4 = aten.mul.Tensor($3, $0) : f32[4,8]
  $5 = aten.t.default($2) : f32[16,4;1,16]
  $6 = aten.mm.default($5, $4) : f32[16,8]
  return ($6)
}
"""
SPLIT = (
    ("buffer %dh :", "buffer %s : f32[32] device saved\nbuffer %dh :"),
    (BACKWARD, LAST),
    ("  alloc %m  stream", "  alloc %s  stream=compute\n  alloc %m  stream"),
    ("@a.backward(%dh, %m, %x)", "@a.backward(%dh, %m, %x, %s)"),
    ("  release %m  stream", "  release %s  stream=compute\n  release %m  stream"),
)
TWO = """\
segment @a.two($0: f32[4,8]) {
  $1 = aten.mul.Tensor($0, $0) : f32[4,8]
  return ($1)
}
"""
ONE_CALL = "compute @a.one(%x, w: %a.param[0:128]) -> (%m, %s)  unit=a stream=compute\n"
TWO_CALL = "  compute @a.two(%m) -> (%h)  unit=a stream=compute\n"


def test_what_its_own_second_segment_reads_has_two_lives() -> None:
    logical = edited((FORWARD, ONE + TWO), (CALL, ONE_CALL + TWO_CALL), *SPLIT)
    program = assert_laws(logical, Recompute(units=("a",)))
    expected = ["a.one", "a.two", "b.forward", "b.backward", "a.one.recompute", "a.backward"]
    assert calls(program) == expected
    assert saved(program) == {"h"}
    body = program.section_by_name[LAST_MICRO_STEP].body
    ends = [op.buffer for op in body if isinstance(op, ops.Release)]
    assert ends == ["m", "h", "m.again", "dh", "s"]
    assert_trains_alike(logical, program)


def test_what_a_second_run_reads_is_kept() -> None:
    two = TWO.replace("return ($1)", "$2 = aten.sigmoid.default($0) : f32[4,8]\n  return ($1, $2)")
    used = LAST.replace("$3: f32[4,8])", "$3: f32[4,8], $4: f32[4,8])")
    for old, new in ((6, 8), (5, 7), (4, 6)):
        used = used.replace(f"${old}", f"${new}")
    used = used.replace("$6: f32[4,8])", "$4: f32[4,8])")
    used = used.replace(
        "  $6 = aten.mul.Tensor($3, $0)",
        "  $5 = aten.mul.Tensor($3, $4) : f32[4,8]\n  $6 = aten.mul.Tensor($5, $0)",
    )
    logical = edited(
        (FORWARD, ONE + two),
        (CALL, ONE_CALL + TWO_CALL.replace("(%h)", "(%h, %q)")),
        *SPLIT,
        (LAST, used),
        ("buffer %s :", "buffer %q : f32[32] device saved\nbuffer %s :"),
        ("  alloc %s  stream", "  alloc %q  stream=compute\n  alloc %s  stream"),
        ("%x, %s)", "%x, %s, %q)"),
        ("  release %s  stream", "  release %q  stream=compute\n  release %s  stream"),
    )
    program = assert_laws(logical, Recompute(units=("a",)))
    assert saved(program) == {"h", "m"}
    again = ["a.one.recompute", "a.two.recompute", "a.backward"]
    assert calls(program)[-3:] == again
    assert_trains_alike(logical, program)


def assert_trains_alike(logical: Program, program: Program) -> None:
    passes = for_stage(3, 3)
    recomputed = manager.run(replace(program, passes=()), passes, reference=logical)
    assert_same(recomputed, applied(logical, passes), seeds=[3])


def test_the_smallest_value_between_a_units_input_and_what_it_saves_is_kept() -> None:
    """An input that no backward reads is kept as its cast to half precision: 64 bytes instead of 128."""
    program = parse(
        "zeroir 1\nmesh dp=1\n"
        "segment @forward($0: f32[4,8], $1: bf16[8,16]) {\n"
        "  $2 = aten._to_copy.default($0, dtype=bf16) : bf16[4,8]\n"
        "  $3 = aten.mm.default($2, $1) : bf16[4,16]\n"
        "  return ($3)\n}\n"
        "segment @handed_on($0: bf16[4,16]) {\n  return ($0)\n}\n"
    )
    pair = SegmentPair(
        forward=program.segment_by_name["forward"],
        backward=program.segment_by_name["handed_on"],
        leaves=(128, 0),
        is_parameter=(False, True),
        uses=(Use.NOBODY,),
        needs=(Need(3, 0),),
        computes_all=True,
    )
    recut = choose(pair)
    assert recut is not None
    assert [node.op for node in recut.forward.nodes] == ["aten._to_copy.default"]
    assert [node.op for node in recut.backward.nodes] == ["aten.mm.default"]
    assert choose(replace(pair, computes_all=False)) is None
    # Where the input is there in any case, nothing is kept for it.
    free = choose(replace(pair, leaves=(0, 0)))
    assert free is not None
    assert free.forward.outputs == ()


def test_what_would_keep_more_than_it_frees_stays() -> None:
    """The second segment would need the first one's result, which nobody keeps, for something as large."""
    two = TWO.replace("return ($1)", "$2 = aten.sigmoid.default($0) : f32[4,8]\n  return ($1, $2)")
    begin = "  alloc %q  stream=compute\n"
    logical = edited(
        (FORWARD, ONE + two),
        ("  release %m  stream=compute\n", "  release %q  stream=compute\n"),
        (
            CALL,
            f"{ONE_CALL}{begin}{TWO_CALL.replace('(%h)', '(%h, %q)')}  release %m  stream=compute\n",
        ),
        ("  release %q", "  release %s  stream=compute\n  release %q"),
        *SPLIT[:3],
        ("@a.backward(%dh, %m, %x)", "@a.backward(%dh, %q, %x, %s)"),
        ("buffer %m : f32[32] device saved", "buffer %m : f32[32] device activation"),
        ("buffer %s :", "buffer %q : f32[32] device saved\nbuffer %s :"),
    )
    program = assert_laws(logical, Recompute(units=("a",)))
    assert calls(program) == [
        *("a.one", "a.two", "b.forward", "b.backward", "a.one.recompute", "a.backward")
    ]
    assert saved(program) == {"h", "q"}


# ------------------------------------------------------------------------------------------ random numbers, statistics

STATEFUL = """\
segment @a.forward($0: f32[4,16], $1: f32[16,8], $2: f32[8], $3: f32[8], $4: i64[1]) {
  $5 = aten.mm.default($0, $1) : f32[4,8]
  $6, $7, $8, $9, $10 = zeroir.batch_norm.default($5, none, none, $2, $3, true, 0.1, 1e-05) : (f32[4,8], f32[8], f32[8], f32[8], f32[8])
  $11, $12 = zeroir.dropout.default($6, 0.5, $4) : (f32[4,8], bool[4,8])
  $13 = aten.mul.Tensor($11, $11) : f32[4,8]
  return ($13, $11, $9, $10)
}
"""  # noqa: E501
BUFFERS = """\
buffer %mean : f32[8] device module_buffer = value mean
buffer %var : f32[8] device module_buffer = value var
buffer %rng : i64[1] host rng = value rng
"""


def stateful() -> Program:
    return edited(
        (FORWARD, STATEFUL),
        ("buffer %h :", f"{BUFFERS}buffer %h :"),
        (
            "scalar %loss =",
            "module_buffer mean : [8] -> %mean\nmodule_buffer var : [8] -> %var\nscalar %loss =",
        ),
        (
            "@a.forward(%x, w: %a.param[0:128]) -> (%h, %m)",
            "@a.forward(%x, w: %a.param[0:128], %mean, %var, %rng) -> (%h, %m, %mean, %var)",
        ),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_statistics_change_once_and_dropout_is_the_same(stage: int) -> None:
    logical = stateful()
    program = assert_laws(logical, Recompute(units=("a",)))
    assert calls(program)[-2:] == ["a.recompute", "a.backward"]
    assert saved(program) == {"h"}
    batches = inputs(logical, 3, 1)
    results = [
        run(proved(logical, (*first, *for_stage(stage, 3))), batches, schedule_seed)
        for schedule_seed, first in enumerate(((), (Recompute(units=("a",)),)))
    ]
    assert_equal(results[1], results[0], range(3), f"stage {stage}")
    for rank in range(3):
        for name in ("mean", "var"):
            one, other = (result.lockstep.buffers(rank)[name] for result in results)
            assert torch.equal(one, other)
    assert results[0].lockstep.buffers(0)["var"].abs().sum() > 0


def test_buffers_for_new_statistics_follow_the_order_of_the_arguments() -> None:
    """Not the order of a set of strings, which differs from process to process."""
    buffers = Recompute(units=("a",))(stateful()).buffers
    assert [b.name for b in buffers if b.name.endswith(".new")] == ["mean.new", "var.new"]


def test_reading_what_has_changed_is_rejected() -> None:
    logical = stateful()
    text = print_program(Recompute(units=("a",))(logical))
    for name in ("mean", "var"):
        cast = f"cast %{name}.new -> %{name}"
        for line in (f"alloc %{name}.new", cast, f"release %{name}.new", f"buffer %{name}.new"):
            assert line in text
            text = "\n".join(item for item in text.split("\n") if line not in item)
        text = text.replace(f"%{name}.new,", f"%{name},").replace(f"%{name}.new)", f"%{name})")
    assert codes(parse(text), logical) == {"Z406"}


def test_another_input_is_rejected() -> None:
    logical = mlp(blocks=3)
    program = Recompute()(logical)
    place, call = the(program, ops.Compute, is_wanted=lambda op: op.segment == "block.recompute")
    arguments = tuple(
        replace(read, view=replace(read.view, region=replace(read.view.region, buffer="h.1")))
        if read.parameter is None
        else read
        for read in call.arguments
    )
    assert arguments != call.arguments
    mutant = put(program, place, replace(call, arguments=arguments))
    assert codes(mutant, logical) == {"Z406"}


# ------------------------------------------------------------------------------------------------------------ refused


def test_only_for_one_device() -> None:
    with pytest.raises(UserError, match=r"which `all-reduce-gradients\{dp=2\}` has ended"):
        manager.check_contracts(applied(mlp(), for_stage(0, 2)), [Recompute()])


def test_the_root_is_not_repeated() -> None:
    with pytest.raises(UserError, match=r"no unit with `\*`; the units are root\.pre and root"):
        Recompute()(mlp(blocks=0))


def test_a_name_of_no_unit_is_refused() -> None:
    with pytest.raises(UserError, match=r"no unit with `head`; .* root\.pre, blocks\.0 and root"):
        Recompute(units=("blocks.*", "head"))(mlp(blocks=1))


@pytest.mark.parametrize("units", [(), ("a,b",), ("a{b}",), ("",)])
def test_what_names_nothing_is_refused(units: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="The option `units` of `recompute` is names of units"):
        Recompute(units=units)


# -------------------------------------------------------------------------------------------------------- real models


@pytest.mark.slow
def test_the_example_keeps_one_activation_a_block() -> None:
    logical = traced(GPT)
    selected = SelectSaved()(logical)
    program = assert_laws(selected, Recompute())
    assert verify(program, logical).findings == ()
    kept = {name for name in saved(program) if name.startswith("blocks.")}
    assert len(kept) == calls(logical).count("block.forward"), "the input of each block's successor"
    assert saved_bytes(program) < 0.2 * saved_bytes(selected)
    # What comes to life anew is smaller once select-saved has been there.
    assert peak(program).total_bytes < peak(Recompute()(logical)).total_bytes
    assert peak(program).total_bytes < 0.6 * peak(selected).total_bytes
    after = SelectSaved()(Recompute()(logical))
    assert verify(after, logical).findings == ()
    assert peak(program).total_bytes < peak(after).total_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "micro_steps", "stages"),
    [
        ("traps", "fp32", 1, (0, 1, 2, 3)),
        ("traps", "bf16", 2, (2, 3)),
        ("convnet", "fp32", 2, (3,)),
    ],
)
def test_bits_of_real_models_do_not_change(
    name: str, precision: str, micro_steps: int, stages: tuple[int, ...]
) -> None:
    """Losses, parameters and running statistics, dropout included, are those without the pass at every stage."""
    path = MODELS / f"{name}.py"
    model_file = load_model_file(str(path))
    choices = {"world_size": 3, "precision": precision, "micro_steps": micro_steps}
    logical = traced(path, **choices)
    without = lower(logical, make_options({**choices, "stage": stages[0]}))
    expected = trained(model_file, without, micro_steps)
    for stage in stages:
        made = make_options({**choices, "stage": stage, "recompute": ("*",)})
        program = lower(logical, made)
        names = [op.segment for op in program.ops() if isinstance(op, ops.Compute)]
        assert any(".recompute" in each for each in names)
        result = trained(model_file, program, micro_steps)
        assert len(result) == len(expected)
        for mine, theirs in zip(result, expected, strict=True):
            assert torch.equal(mine, theirs)
