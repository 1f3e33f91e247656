"""Steps before the decision: they rest on a guess, and become final where the decision agrees with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.certificates.spans import Pieces, aligned, require
from tools.certificates.updates import (
    STATES,
    check_divisor,
    check_scale,
    final,
    follows,
    named,
    own_settings,
    stepped,
)
from tools.certificates.values import ZERO, Key, Value, made
from tools.checker.program import regions, settings
from tools.checker.reading import FileRecord

if TYPE_CHECKING:
    from tools.certificates.sections import Left, SectionCheck


def guess(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    """A guess is the decision of a step that is neither clipped nor skipped."""
    require(section.guess in (None, op), "guesses again")
    section.guess = op
    check_divisor(section, op)
    check_scale(section, op)
    named(section, op.step, section.names.report("step"))
    read = [
        (name, *section.read(r))
        for name in ("loss_scale", "weight", "step")
        for r in regions(op, name)
    ]
    why = op.divisor, tuple(read)
    left = ((op.gradient_divisor, "guessed"), (op.next_step, "next_step"))
    return [(region, [(0, 1, made((name, *why)))]) for region, name in left]


def speculative_step(section: SectionCheck, op: FileRecord, claimed: Pieces) -> Left:
    """Elements are guessed ones of the next version; ``kept`` has what they were."""
    for region, name in ((op.gradient_divisor, "guessed"), (op.step, "next_step")):
        is_told = all(_told(section, k) == name for *_, (k, _) in section.read(region))
        require(is_told, f"reads in %{region.buffer} what no guess has left")
    number = claimed[0][2][0][4] if claimed and claimed[0][2][0][0] == "flat" else None
    require(type(number) is int, "leaves nothing guessed")
    _mean(section, op, number)
    old = [section.read(region) for region in (op.param, *op.states)]
    return [*_changed(section, op, (0, None), (1, number)), *zip(op.kept, old, strict=True)]


def commit_step(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    """Guessed elements become final, by a decision that was compared with the guess."""
    follows(section, op, "gradient_divisor", "skip", "step", "redo")
    require(section.decision is not None and section.decision.guess is not None, "knows no guess")
    pieces = section.read(op.param)
    number = pieces[0][2][0][4] if pieces and pieces[0][2][0][0] == "flat" else None
    require(type(number) is int, "finds nothing guessed")
    _mean(section, op, number)
    for region, now in zip(op.kept, (op.param, *op.states), strict=True):
        wanted = [(a, b, ((*k[:3], 0, None), s)) for a, b, (k, s) in section.read(now)]
        require(section.read(region) == wanted, f"does not find in %{region.buffer} what was there")
    return _changed(section, op, (1, number), (1, None))


def _told(section: SectionCheck, key: Key) -> str:
    return str(section.claims.meaning(key, section.rank)[0])


def _mean(section: SectionCheck, op: FileRecord, number: int | None) -> None:
    """A guess's number stands for the optimizer and the settings of the step."""
    groups = sorted(settings(op), key=lambda item: item[0])
    read = tuple((n, *section.read(lr), *section.read(hyper)) for n, lr, hyper in groups)
    section.claims.mean(("guess", number), -1, ("speculates", op.algorithm, read))


def _changed(
    section: SectionCheck, op: FileRecord, before: tuple[int, Any], after: tuple[int, Any]
) -> Left:
    """Set parameters and states of a step to another version."""
    own_settings(section, op)
    names = STATES.get(op.algorithm, ())
    require(len(names) == len(op.states), "has other states than its optimizer")
    rounded = [] if op.rounded is None else [op.rounded]
    fields = [op.param, *op.states, *rounded]
    left: list[list[tuple[int, int, Value]]] = [[] for _ in fields]
    held = [section.read(region) for region in (op.param, *op.states)]
    held += [section.read(r) if before[0] else section.held(r, section.rank) for r in rounded]
    for a, b, (param, grad, *others) in aligned(held[0], section.read(op.grad), *held[1:]):
        key, shift = param
        require(key[0] == "flat" and key[1] in {"param", "master"}, "updates no parameters")
        require(key[3:] == before, "updates elements of another version")
        stepped(section, op, key, a + shift, b + shift)
        own = (*names, *["param"] * len(rounded))
        for name, state in zip(own, others, strict=True):
            is_fresh = name == "param" and not before[0]
            is_so = state == (("flat", name, key[2], *before), shift) or is_fresh
            require(is_so, f"takes other elements as {name}")
        flat = section.names.flats[key[2]]
        for region in rounded:
            is_so = section.names.buffers[region.buffer].dtype == flat.dtype
            require(key[1] == "master" and is_so, "rounds what are no master weights")
        require(grad == ZERO or grad[1] == shift, "takes the gradient of other elements")
        final(section, key[2], [(a, b, (grad[0], shift))])
        for pieces, name in zip(left, (key[1], *own), strict=True):
            pieces.append((a, b, (("flat", name, key[2], *after), shift)))
    return list(zip(fields, left, strict=True))
