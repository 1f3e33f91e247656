"""Contracts between passes, and the blame for a pass that breaks a program."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from examples import any_length
from tests.support.edits import is_of, mapped, without_ops
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.api.compiling import compile_model
from zeroir.errors import InternalError, UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.program import Program
from zeroir.ir.sizes import Size
from zeroir.passes import manager
from zeroir.passes.base import Fact
from zeroir.passes.pipelines import parse_spec
from zeroir.verify import VerificationError


def test_each_pass_is_noted_in_the_program() -> None:
    passes = for_stage(3, 2)
    programs = [program for _, program in manager.steps(mlp(blocks=1), passes)]
    specs = [step.spec() for step in passes]
    assert [program.passes for program in programs] == [
        tuple(specs[: i + 1]) for i in range(len(specs))
    ]
    assert manager.run(mlp(blocks=1), passes) == programs[-1]


def test_the_program_given_is_left_alone() -> None:
    logical = mlp(blocks=1)
    manager.run(logical, for_stage(3, 2))
    assert logical == mlp(blocks=1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_can_be_reached_from_the_one_below(stage: int) -> None:
    logical, passes = mlp(blocks=1), for_stage(3, 2)
    half = applied(logical, passes[: stage + 1])
    rest = manager.run(half, passes[stage + 1 :], reference=logical)
    assert rest == applied(logical, passes)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["shard-optimizer"], "`all-reduce-gradients` establishes, but no pass ran before"),
        (
            ["all-reduce-gradients{dp=2}", "shard-optimizer", "prefetch"],
            "but only `all-reduce-gradients{dp=2}` and `shard-optimizer` ran before it; put `insert-releases` before",
        ),
        (
            ["all-reduce-gradients{dp=2}", "all-reduce-gradients{dp=4}"],
            "which `all-reduce-gradients{dp=2}` has ended; leave one of them out.",
        ),
        (
            ["all-reduce-gradients{dp=2}", "shard-optimizer", "shard-optimizer"],
            "a second time: `shard-optimizer` has done so; leave one of them out.",
        ),
        (
            ["all-reduce-gradients{dp=2}", "overlap-update", "shard-optimizer"],
            "which `overlap-update` has ended; put `shard-optimizer` before it.",
        ),
    ],
)
def test_a_pipeline_in_the_wrong_order_is_refused(specs: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        manager.run(mlp(blocks=1), [parse_spec(spec) for spec in specs])


def test_passes_that_ran_before_count() -> None:
    logical, passes = mlp(blocks=1), for_stage(0, 2)
    once = manager.run(logical, passes)
    with pytest.raises(UserError, match=r"`all-reduce-gradients\{dp=2\}` has ended"):
        manager.run(once, passes, reference=logical)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Break:
    """A pass that does something wrong."""

    name: ClassVar[str] = "break"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    establishes: ClassVar[frozenset[Fact]] = frozenset()
    destroys: ClassVar[frozenset[Fact]] = frozenset()

    change: Callable[[Program], Program]

    def spec(self) -> str:
        return self.name

    def __call__(self, program: Program) -> Program:
        return self.change(program)


def test_a_pass_that_breaks_the_program_is_named() -> None:
    passes = [
        *for_stage(0, 2),
        _Break(change=lambda program: without_ops(program, is_of(ops.Release))),
    ]
    with pytest.raises(InternalError, match=r"The pass `break` broke the program\.(.|\n)*Z104"):
        manager.run(mlp(blocks=1), passes)


@pytest.mark.slow
def test_a_pass_that_breaks_the_program_at_the_smallest_sizes_is_named() -> None:
    logical = compile_model(any_length.__file__, evaluate=False).logical
    numel = {buffer.name: buffer.numel for buffer in logical.buffers}
    smallest = {dim.name: dim.minimum for dim in logical.dims}

    def with_fill(op: ops.Op) -> list[ops.Op]:
        size = numel[op.buffer] if isinstance(op, ops.Alloc) else 0
        if not isinstance(op, ops.Alloc) or not isinstance(size, Size):
            return [op]
        region = Region(buffer=op.buffer, offset=0, numel=size.at(smallest) + 1)
        return [op, ops.Fill(destination=region, value=0.0, stream=op.stream)]

    passes = [_Break(change=lambda program: mapped(program, with_fill)), *for_stage(0, 1)]
    with pytest.raises(
        InternalError, match=r"The pass `break` broke the program\.(.|\n)*length is"
    ):
        manager.run(logical, passes)


def test_a_pass_that_loses_a_bound_is_named() -> None:
    passes = [*for_stage(2, 2), _Break(change=lambda program: replace(program, bounds=()))]
    with pytest.raises(InternalError, match="The pass `break` lost the bound on full_gradients"):
        manager.run(mlp(blocks=1), passes)


def test_no_pass_is_blamed_for_what_was_broken_before() -> None:
    broken = without_ops(applied(mlp(blocks=1), for_stage(0, 2)), is_of(ops.Wait))
    with pytest.raises(VerificationError) as caught:
        manager.run(broken, for_stage(1, 2)[1:], reference=mlp(blocks=1))
    assert "pass" not in str(caught.value)


def test_a_pass_that_fails_is_named() -> None:
    def fail(program: Program) -> Program:
        raise KeyError(program.fingerprint)

    with pytest.raises(InternalError, match="The pass `break` failed: KeyError"):
        manager.run(mlp(blocks=1), [_Break(change=fail)])
