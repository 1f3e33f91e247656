"""Damages to the update of a program: its decision, optimizer steps, averages and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from tests.support.edits import Mutation, at, is_of, on_one, places, put
from zeroir.ir import ops
from zeroir.ir.ops import Op
from zeroir.ir.program import Program


def _divisor(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, ops.Decide):
        return None
    return (replace(op, divisor=chance.choice([1, op.divisor + 1, op.divisor * 2])),)


def _forget_decision(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    """The update ignores overflow, norm or loss scale."""
    if not isinstance(op, ops.Decide):
        return None
    match chance.randrange(3):
        case 0:
            return (replace(op, overflow=None, skip=None),)
        case 1:
            return (replace(op, norm=None, max_norm=None),)
        case _:
            return (replace(op, loss_scale=None),)


def _no_skip(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...] | None:
    if isinstance(op, ops.Direction | ops.OptimizerStep | ops.CommitStep | ops.Average):
        return (replace(op, skip=None),)
    return None


def _decay(op: Op, _program: Program, _chance: Random) -> tuple[Op, ...] | None:
    return (replace(op, decay=op.decay / 2),) if isinstance(op, ops.Average) else None


def _fewer_sources(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    if not isinstance(op, ops.GradNorm | ops.CheckFinite) or len(op.sources) < 2:
        return None
    chosen = chance.randrange(len(op.sources))
    kept = tuple(s for i, s in enumerate(op.sources) if i != chosen)
    return (
        replace(op, sources=kept if chance.random() < 0.5 else (*op.sources, op.sources[chosen])),
    )


def _tell(program: Program, chance: Random) -> Program | None:
    """An optimizer step is told what another one is told."""
    steps = places(program, is_of(ops.OptimizerStep))
    if len(steps) < 2:
        return None
    one, other = chance.sample(steps, 2)
    op, like = at(program, one), at(program, other)
    assert isinstance(op, ops.OptimizerStep)
    assert isinstance(like, ops.OptimizerStep)
    choices: list[Op] = [
        replace(op, grad=like.grad),
        replace(op, states=like.states),
        replace(op, states=op.states[::-1]),
        replace(op, lr=like.gradient_divisor, gradient_divisor=like.lr),
        replace(op, param=like.param),
        replace(op, factors=like.factors),
        replace(op, whole=like.whole),
        replace(op, scales=like.scales),
        replace(op, scales=op.scales[::-1]),
        replace(op, scales=()),
        replace(op, states=op.states[::-1], scales=op.scales[::-1]),
        replace(op, states=like.states, scales=like.scales),
    ]
    return put(program, one, chance.choice(choices))


def _group(program: Program, chance: Random) -> Program | None:
    """A group loses or exchanges an interval or a setting, in the header or in a step."""
    if len(program.groups) < 2:
        return None
    one, other = chance.sample(program.groups, 2)
    mine, theirs = chance.choice(one.intervals), chance.choice(other.intervals)
    flat, start, stop = mine
    cut = chance.randrange(start, stop + 1, 64)
    changed = {
        "moved": (
            replace(one, intervals=tuple(i for i in one.intervals if i != mine)),
            replace(other, intervals=(*other.intervals, mine)),
        ),
        "lost": (replace(one, intervals=tuple(i for i in one.intervals if i != mine)), other),
        "twice": (replace(one, intervals=(*one.intervals, theirs)), other),
        "cut": (
            replace(
                one, intervals=tuple((flat, start, cut) if i == mine else i for i in one.intervals)
            ),
            replace(other, intervals=(*other.intervals, (flat, cut, stop))),
        ),
        "lr": (replace(one, lr=other.lr), replace(other, lr=one.lr)),
        "hyper": (replace(one, hyper=other.hyper), replace(other, hyper=one.hyper)),
        "algorithm": (replace(one, algorithm=chance.choice(list(ops.Algorithm))), other),
        "name": (replace(one, name=other.name), replace(other, name=one.name)),
    }
    new = dict(zip((one, other), changed[chance.choice(sorted(changed))], strict=True))
    return replace(program, groups=tuple(new.get(group, group) for group in program.groups))


def _settings(op: Op, _program: Program, chance: Random) -> tuple[Op, ...] | None:
    """A step loses, repeats or exchanges the settings of its groups."""
    if not isinstance(op, ops.Direction | ops.OptimizerStep) or not op.others:
        return None
    (other, *more) = op.others
    choices = [
        replace(op, others=tuple(more)),
        replace(op, others=(*op.others, other)),
        replace(op, lr=other.lr),
        replace(op, others=(replace(other, lr=op.lr), *more)),
        replace(op, hyper=other.hyper, others=(replace(other, hyper=op.hyper), *more)),
        replace(op, group=other.group, others=(replace(other, group=op.group), *more)),
        replace(op, group=other.group, lr=other.lr, hyper=other.hyper, others=()),
    ]
    return (chance.choice(choices),)


def _speculation(program: Program, chance: Random) -> Program | None:
    """A guess, a speculative step or its commit is told something else, or the decision compares something else."""
    kinds = (ops.Guess, ops.Decide, ops.SpeculativeStep, ops.CommitStep)
    found = places(program, is_of(*kinds))
    if not any(isinstance(at(program, place), ops.Guess) for place in found):
        return None
    place = chance.choice(found)
    op = at(program, place)
    alike = [at(program, other) for other in found if type(at(program, other)) is type(op)]
    like = chance.choice(alike)
    choices: list[tuple[Op, ...]] = [()]
    match op:
        case ops.Guess():
            choices += [(replace(op, divisor=op.divisor + 1),), (replace(op, loss_scale=None),)]
            choices += [
                (replace(op, gradient_divisor=op.next_step, next_step=op.gradient_divisor),)
            ]
        case ops.Decide():
            choices = [
                (replace(op, guess=None, redo=None),),
                (replace(op, guess=op.gradient_divisor),),
                (replace(op, guess=op.redo),),
            ]
        case ops.SpeculativeStep():
            assert isinstance(like, ops.SpeculativeStep)
            choices += [
                (replace(op, kept=op.kept[::-1]),),
                (replace(op, kept=like.kept),),
                (replace(op, grad=like.grad),),
                (replace(op, lr=op.gradient_divisor, gradient_divisor=op.lr),),
                (replace(op, step=op.gradient_divisor, gradient_divisor=op.step),),
                (replace(op, others=()),),
                (replace(op, rounded=None),),
                (replace(op, rounded=like.rounded),),
                (op, op),
            ]
        case ops.CommitStep():
            assert isinstance(like, ops.CommitStep)
            choices += [
                (replace(op, kept=op.kept[::-1]),),
                (replace(op, kept=like.kept),),
                (replace(op, kept=(op.param, *op.states)),),
                (replace(op, redo=op.gradient_divisor),),
                (replace(op, redo=op.skip or op.step),),
                (replace(op, states=op.states[::-1]),),
                (replace(op, grad=like.grad),),
                (replace(op, skip=None),),
                (replace(op, others=()),),
                (replace(op, rounded=None),),
                (replace(op, rounded=like.rounded),),
                (op, op),
            ]
        case _:
            return None
    return put(program, place, *chance.choice(choices))


UPDATE_MUTATIONS: Mapping[str, Mutation] = {
    "change-divisor": on_one(is_of(ops.Decide), _divisor),
    "forget-decision": on_one(is_of(ops.Decide), _forget_decision),
    "forget-skip": on_one(
        is_of(ops.Direction, ops.OptimizerStep, ops.CommitStep, ops.Average), _no_skip
    ),
    "change-decay": on_one(is_of(ops.Average), _decay),
    "change-sources": on_one(is_of(ops.GradNorm, ops.CheckFinite), _fewer_sources),
    "tell-step": _tell,
    "change-group": _group,
    "change-speculation": _speculation,
    "change-settings": on_one(is_of(ops.Direction, ops.OptimizerStep), _settings),
}
