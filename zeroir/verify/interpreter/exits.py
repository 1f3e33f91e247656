"""Checks that the memory at the end of a section implies the exit state.

The exit state is the entry state of the next section. There the finished micro-step counts as past, and after the
update, version 1 is version 0 of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from zeroir.ir.buffers import Buffer, Region, Role, copied_region, whole
from zeroir.ir.contents import (
    GRAD,
    PARAM,
    Content,
    FlatContent,
    Micro,
    NamedContent,
    SnapshotContent,
    WeightContent,
    Zeros,
)
from zeroir.ir.own_coordinates import OWN_COORDINATES
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    UPDATE,
    Holding,
    OutputBinding,
)
from zeroir.verify.context import spell
from zeroir.verify.equivalence.reports import check_reports
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.descriptions import CAUSES, describe
from zeroir.verify.interpreter.domain import (
    Elements,
    FlatKey,
    NamedKey,
    PieceList,
    Poison,
    Split,
    Strides,
    Undefined,
    Value,
    Zero,
    aligned,
    coalesced,
    cut,
    rebased,
    spread,
    unpack,
)
from zeroir.verify.interpreter.exit_scalars import check_exit_scalars
from zeroir.verify.interpreter.gradients import is_zero, measure, weight_problem
from zeroir.verify.interpreter.section_run import SectionRun


def check_exit(run: SectionRun) -> None:
    """Report each content of the exit state that the memory does not imply."""
    holdings: dict[str, list[Holding]] = {}
    refined = {
        replace(h.region, shard=None)
        for h in run.section.exit.holdings
        if h.region.shard is not None
    }
    for holding in run.section.exit.holdings:
        holdings.setdefault(holding.region.buffer, []).append(holding)
        region = holding.region
        pieces = run.memory.read(region)
        if region in refined:
            pieces = _unsplit(pieces)
        _check(run, region, pieces, holding.content, (0, run.memory.numel(region)))
    for buffer in run.program.buffers:
        if buffer.holds is not None and not isinstance(buffer.holds, SnapshotContent):
            _check_rest(run, buffer, buffer.holds, holdings.get(buffer.name, []))
    check_exit_scalars(run)
    check_reports(run)
    if run.section.name in (MICRO_STEP, LAST_MICRO_STEP, EVALUATE):
        _check_outputs(run)
    if run.section.name == SAVE:
        _check_saved(run)


def _check_rest(run: SectionRun, buffer: Buffer, content: Content, holdings: list[Holding]) -> None:
    """Check that the buffer has its resting content where no holding describes it, including around own slices."""
    pieces = run.memory.read(whole(buffer))

    def check_between(start: int, stop: int) -> None:
        if start < stop:
            _check(run, whole(buffer), cut(pieces, start, stop), content, (start, stop))

    at = 0
    for holding in sorted(holdings, key=lambda h: h.region.offset):
        region = holding.region
        check_between(at, region.offset)
        at = max(at, region.stop)
        unsliced = replace(region, shard=None)
        if region.shard is None or run.layout.sizes[region.shard] == 1:
            continue
        if any(h.region == unsliced for h in holdings):
            continue
        rests = _unsplit(cut(pieces, region.offset, region.stop))
        rest = run.layout.beside(holding, content)
        if rest is content:
            _check(run, whole(buffer), rests, content, (region.offset, region.stop))
        else:
            _check(run, unsliced, rebased(rests, region.offset), rest, (0, region.numel))
    check_between(at, buffer.numel)


def _unsplit(pieces: PieceList, sizes: Mapping[str, int] | None = None) -> PieceList:
    """Replace each split by the values outside the own slice.

    With the ``sizes`` of the mesh axes, replace it by the own slices of all ranks instead.
    """
    replaced: list[tuple[int, int, Value]] = []
    for a, b, value in pieces:
        if not isinstance(value, Split):
            replaced.append((a, b, value))
            continue
        inside: PieceList = value.rest
        if sizes is not None:
            size = sizes[value.axis]
            numel = (b - a) // size
            inside = spread(unpack(value.own, numel), value.axis, size, numel, numel)
        replaced += rebased(inside, -a)
    return replaced


def _check(
    run: SectionRun, region: Region, pieces: PieceList, content: Content, interval: tuple[int, int]
) -> None:
    """Compare ``pieces`` at the positions ``interval`` of a region with the content of the whole region."""
    if any(isinstance(value, Split) for _, _, value in pieces):
        # Each element is in the own slice of one rank, and in the rest of every other rank.
        for version in (_unsplit(pieces, run.sizes), _unsplit(pieces)):
            _check(run, region, version, content, interval)
        return
    match content:
        case FlatContent() if content.quantity == GRAD:
            _check_gradient(run, region, pieces, content, interval)
        case FlatContent():
            _check_flat(run, region, pieces, content)
        case NamedContent():
            _check_named(run, region, pieces, content)
        case WeightContent():
            _check_weight(run, region, pieces, content)
        case Zeros():
            wrong = next(
                (v for _, _, v in pieces if not is_zero(v) and not algebra.is_poisoned(v)), None
            )
            if wrong is not None:
                run.fail_at_exit("Z402", region, f"should be zeros but holds {describe(wrong)}")
        case SnapshotContent():
            pass  # Only the section `save` writes it; see ``zeroir.verify.interpreter.snapshots``.
        case _:
            assert_never(content)


def _check_flat(run: SectionRun, region: Region, pieces: PieceList, content: FlatContent) -> None:
    flat = run.program.flat_by_name[content.flat]
    is_stepped = run.section.name == UPDATE and flat.is_trainable
    version = content.version + (1 if is_stepped else 0)
    strides = run.layout.strides(content, run.memory.numel(region))
    expected = Elements(FlatKey(content.quantity, content.flat, version), content.offset, strides)
    for a, b, value in pieces:
        if _final(value, is_guessed=content.guessed) == expected or algebra.is_poisoned(value):
            continue
        if isinstance(value, Zero) and not strides and _is_padding(run, content, a, b):
            continue
        buffer = run.program.buffer_by_name[region.buffer]
        # Compute ops read gathered copies (Z401); the update writes persistent ones (Z403).
        code = "Z403" if buffer.is_persistent or content.quantity != PARAM else "Z401"
        stage = "the updated " if is_stepped else ""
        stage = "the guessed " if content.guessed else stage
        run.fail_at_exit(
            code,
            region,
            f"should hold {stage}{content.quantity} of flat {content.flat} but holds {describe(value)}",
        )
        return


def _final(value: Value, *, is_guessed: bool) -> Value | None:
    """Return the value without its guess; None if it has a guess and should not, or the reverse."""
    if not isinstance(value, Elements) or not isinstance(value.key, FlatKey):
        return value
    if (value.key.guess is not None) is not is_guessed:
        return None
    return replace(value, key=replace(value.key, guess=None))


def _is_padding(run: SectionRun, content: FlatContent, start: int, stop: int) -> bool:
    if content.quantity in OWN_COORDINATES:
        return False
    cuts = run.layout.between(content.flat, content.offset + start, content.offset + stop)
    return all(slot is None for _, _, slot in cuts)


def _check_gradient(
    run: SectionRun,
    region: Region,
    pieces: PieceList,
    content: FlatContent,
    interval: tuple[int, int],
) -> None:
    start, stop = interval
    strides: Strides = run.layout.strides(content, run.memory.numel(region))
    on_flat = run.layout.on_flat(
        rebased(pieces, start), stop - start, content.offset + start, strides
    )
    if on_flat is None:
        run.fail_at_exit(
            "Z402", region, f"does not hold the gradient of flat {content.flat} in this order"
        )
        return
    micro, section = content.micro, run.section.name
    if micro is None or micro is Micro.STALE:
        _check_stale(run, region, on_flat, content.flat)
        return
    if section == UPDATE and micro is Micro.PAST:
        # The next step starts with empty sums.
        if any(not is_zero(v) and not algebra.is_poisoned(v) for _, _, v in on_flat):
            run.fail_at_exit("Z402", region, "should be zeros again for the next step")
        return
    if section == MICRO_STEP and micro is Micro.PAST:
        micro = Micro.ALL
    problem = measure(run, on_flat, content.flat, micro, run.layout.reduced(content))
    if problem is not None:
        sentence = f"breaks its contract: {problem.sentence}"
        run.fail_at_exit(problem.code, region, sentence, problem.advice)


def _check_weight(
    run: SectionRun, region: Region, pieces: PieceList, content: WeightContent
) -> None:
    micro, section = content.micro, run.section.name
    if micro is Micro.STALE:
        return
    if micro is Micro.CURRENT:
        # Only the host writes it, no op does.
        expected = run.layout.pieces(content, run.memory.numel(region))
        if any(v != w for _, _, v, w in aligned(pieces, expected) if not isinstance(v, Poison)):
            run.fail_at_exit(
                "Z402", region, "should hold the weights of the micro-batches unchanged"
            )
        return
    if section == UPDATE and micro is Micro.PAST:
        if any(not isinstance(v, Zero | Poison) for _, _, v in pieces):
            run.fail_at_exit("Z402", region, "should be 0 again for the next step")
        return
    if section == MICRO_STEP and micro is Micro.PAST:
        micro = Micro.ALL
    for _, _, value in pieces:
        problem = weight_problem(run, value, micro, run.layout.reduced(content))
        if problem is not None:
            sentence = f"breaks its contract: {problem.sentence}"
            run.fail_at_exit(problem.code, region, sentence, problem.advice)


def _check_stale(run: SectionRun, region: Region, on_flat: PieceList, flat: str) -> None:
    for a, b, value in on_flat:
        if isinstance(value, Zero | Poison):
            continue
        for x, y, slot in run.layout.between(flat, a, b):
            if slot is None:
                what = CAUSES[value.cause] if isinstance(value, Undefined) else "not zeros"
                run.fail_at_exit("Z402", region, f"has padding [{x}:{y}] that is {what}")
                return


def _check_named(run: SectionRun, region: Region, pieces: PieceList, content: NamedContent) -> None:
    buffer = run.program.buffer_by_name[region.buffer]
    is_kept = buffer.role is Role.CONSTANT or _is_elsewhere(run, region, content)
    # An evaluation only leaves its loss and its outputs, and nothing else changes these.
    if buffer.role is Role.OUTPUT:
        is_kept |= not any(b.buffer == buffer.name for b in _written_outputs(run))
    elif buffer.name == run.program.eval_loss:
        is_kept |= run.section.name != EVALUATE
    elif run.section.name == EVALUATE:
        is_kept |= buffer.role in (Role.SCALAR, Role.MODULE_BUFFER)
    own = Elements(NamedKey(content.name, content.version))
    for _, _, value in pieces:
        hole = algebra.undefined_in(value)
        if hole is not None:
            run.fail_at_exit("Z103", region, f"holds {CAUSES[hole.cause]}")
            return
        if is_kept and value != own and not algebra.is_poisoned(value):
            should = f"should hold the value {content.name} unchanged"
            run.fail_at_exit("Z103", region, f"{should} but holds {describe(value)}")
            return


def _is_elsewhere(run: SectionRun, region: Region, content: NamedContent) -> bool:
    """Return whether another buffer or region has the same named value, so that this one must not change."""
    holders = run.program.buffers_by_content.get(content, ())
    if any(name != region.buffer for name in holders):
        return True
    return any(h.content == content and h.region != region for h in run.section.exit.holdings)


def _written_outputs(run: SectionRun) -> list[OutputBinding]:
    """Return the outputs that the section writes: those of steps, or those of evaluations."""
    if run.section.name not in (MICRO_STEP, LAST_MICRO_STEP, EVALUATE):
        return []
    is_step = run.section.name != EVALUATE
    return [output for output in run.program.outputs if output.is_of_steps is is_step]


def _check_outputs(run: SectionRun) -> None:
    """Check that a micro-step or an evaluation writes each of its outputs, from this rank's batch alone."""
    what = "the evaluation" if run.section.name == EVALUATE else "the micro-step"
    for output in _written_outputs(run):
        buffer = run.program.buffer_by_name[output.buffer]
        region, old = whole(buffer), buffer.holds
        for _, _, value in run.memory.read(region):
            if not isinstance(value, Elements):
                continue
            if value.summed:
                run.fail_at_exit(
                    "Z402", region, "is summed over ranks: it is to be of this rank's batch"
                )
                break
            if isinstance(old, NamedContent) and value.key == NamedKey(old.name, old.version):
                run.fail_at_exit("Z103", region, f"still holds what it held before {what}")
                break


def _check_saved(run: SectionRun) -> None:
    """Check that section ``save`` leaves in each snapshot the present elements of the region that it copies."""
    for buffer in run.program.buffers:
        if not isinstance(buffer.holds, SnapshotContent):
            continue
        source = copied_region(buffer.holds)
        copied = coalesced(run.memory.read(whole(buffer)))
        present = coalesced(run.memory.read(source))
        if copied == present or any(algebra.is_poisoned(value) for *_, value in copied):
            continue
        wrong = next(piece for piece in copied if piece not in present)[2]
        where = spell(source, run.program)
        run.fail_at_exit(
            "Z407", whole(buffer), f"should be a copy of {where} but holds {describe(wrong)}"
        )
