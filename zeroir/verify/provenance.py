"""What makes the contents true that a program begins with: the engine gives buffers their first values, and no others.

Every section is proved from its entry state, and every exit state entails the entry state that follows. What is left
is the beginning. Before the first step the engine fills parameters, masters and module buffers, binds inputs, draws
seeds, sets scalars, and clears all else; it gathers what lives over the joint between two steps. A content that none
of this brings about is a claim about memory that nobody has written.

So a named value has one home, the buffer that is bound to it; a copy elsewhere would be true only by luck when the
host gives the home another value. And a role, which says what the host does with a buffer, must fit what the buffer
holds and is bound to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from zeroir.ir.buffers import Buffer, Role, whole
from zeroir.ir.contents import GRAD, MASTER, PARAM, Content, FlatContent, Micro, NamedContent, Zeros
from zeroir.ir.dtypes import DType
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    Holding,
    Program,
    Section,
    State,
)
from zeroir.verify.context import Findings, spell

INPUT, MODULE_BUFFER, INITIAL = "an input", "a module buffer", "an initial value"
_BOUND_TO = {
    Role.INPUT: INPUT,
    Role.MODULE_BUFFER: MODULE_BUFFER,
    Role.CONSTANT: MODULE_BUFFER,
    Role.SCALAR: INITIAL,
}
"""What the engine fills a buffer of a role from. It draws seeds for ``rng`` by itself, and clears other scalars."""


def check_provenance(program: Program, findings: Findings) -> None:
    """Check bindings, roles, and the contents at rest and between two steps."""
    bound = dict(_bound(program, findings))
    homes: dict[str, str] = {}
    for buffer in program.buffers:
        for sentence in _role_problems(buffer, bound.get(buffer.name)):
            findings.add("Z008", f"buffer %{buffer.name} {sentence}", buffers=(buffer.name,))
        if isinstance(buffer.holds, NamedContent):
            home = homes.setdefault(buffer.holds.name, buffer.name)
            if home != buffer.name:
                findings.add(
                    "Z008",
                    f"buffer %{buffer.name} rests with the value {buffer.holds.name}, whose home is %{home}: "
                    "nothing keeps the two alike",
                    buffers=(buffer.name, home),
                )
    for section in program.sections:
        for state in (section.entry, section.exit):
            for holding in state.holdings:
                held = program.buffer_by_name.get(holding.region.buffer)
                if held is None:
                    continue
                problem = _holding_problem(
                    held, holding, is_between_steps=is_between(section, state)
                )
                if problem is not None:
                    where = spell(holding.region, program)
                    findings.add(
                        "Z008",
                        f"in a state of {section.name} {where} {problem}",
                        buffers=(held.name,),
                    )


def is_between(section: Section, state: State) -> bool:
    """Whether a state of a section may stand before the first step."""
    if section.name in (MICRO_STEP, EVALUATE):
        return True
    return state is (section.entry if section.name == LAST_MICRO_STEP else section.exit)


def _bound(program: Program, findings: Findings) -> Iterator[tuple[str, str]]:
    """Buffers that are filled from outside, with what fills them."""
    filled: dict[str, str] = {}
    for what, name, kind in (
        *((f"input {b.path}", b.buffer, INPUT) for b in program.inputs),
        *((f"module buffer {b.name}", b.buffer, MODULE_BUFFER) for b in program.module_buffers),
        *((f"the initial value of %{b.buffer}", b.buffer, INITIAL) for b in program.scalars),
    ):
        if name in filled:
            findings.add("Z002", f"{what} is bound to %{name}, which {filled[name]} fills already")
        filled.setdefault(name, what)
        yield name, kind
    for paths, what in (
        ([b.path for b in program.inputs], "input"),
        ([b.name for b in program.module_buffers], "module buffer"),
    ):
        for path in {path for path in paths if paths.count(path) > 1}:
            findings.add("Z002", f"{what} {path} is bound twice")
    for binding in program.inputs:
        buffer = program.buffer_by_name.get(binding.buffer)
        if buffer is None:
            continue
        if (buffer.dtype, buffer.numel) != (binding.dtype, math.prod(binding.shape)):
            findings.add(
                "Z008",
                f"input {binding.path} is {binding.dtype}{list(binding.shape)}, and %{buffer.name} holds "
                f"{buffer.dtype}[{buffer.numel}]",
            )
    for held in program.module_buffers:
        buffer = program.buffer_by_name.get(held.buffer)
        if buffer is None:
            continue
        if buffer.numel != math.prod(held.shape):
            findings.add(
                "Z008",
                f"module buffer {held.name} is {list(held.shape)}, and %{buffer.name} holds {buffer.numel} elements",
            )
        if held.data is not None and len(held.data) != buffer.size_bytes:
            findings.add(
                "Z008",
                f"module buffer {held.name} has {len(held.data)} bytes of data, and %{buffer.name} holds "
                f"{buffer.size_bytes}",
            )


def _role_problems(buffer: Buffer, bound: str | None) -> Iterator[str]:
    """What the engine does with a buffer of this role that does not fit what it holds."""
    role, holds = buffer.role, buffer.holds
    wanted = _BOUND_TO.get(role)
    if wanted is None and bound is not None:
        yield f"has the role {role}, but {bound} is bound to it"
    if wanted is not None and bound is None and role is not Role.SCALAR:
        yield f"has the role {role}, but nothing gives it a value: {wanted} must be bound to it"
    elif wanted is not None and bound not in (None, wanted):
        yield f"has the role {role}, but {bound} is bound to it instead of {wanted}"
    if role is Role.RNG and buffer.dtype is not DType.I64:
        yield f"has the role {role}, whose seeds are i64, but elements of {buffer.dtype}"
    is_named = role is Role.RNG or wanted is not None
    if is_named and not isinstance(holds, NamedContent):
        yield f"has the role {role}, but rests with no value of its own (`= value NAME`)"
    if isinstance(holds, NamedContent) and not is_named:
        yield f"rests with the value {holds.name}, but nothing gives a buffer of role {role} that value"
    if isinstance(holds, FlatContent) and not is_named:
        quantity = holds.quantity
        expected = {PARAM: Role.PARAM, MASTER: Role.MASTER, GRAD: Role.GRAD}.get(
            quantity, Role.STATE
        )
        if role is not expected:
            yield f"rests with {quantity} of flat {holds.flat}, but has the role {role}"
    if isinstance(holds, Zeros) and role is not Role.GRAD:
        yield f"rests with zeros, which only a gradient does, but has the role {role}"
    if isinstance(holds, NamedContent | FlatContent) and holds.version:
        yield f"rests with version {holds.version} of its content: at rest every version is 0"
    if isinstance(holds, FlatContent) and holds.micro in (Micro.CURRENT, Micro.ALL):
        yield f"rests with a gradient of {holds.micro} micro-steps: before a step there is none"


def _holding_problem(buffer: Buffer, holding: Holding, *, is_between_steps: bool) -> str | None:
    """Why nothing makes a content of a state true."""
    content, rest = holding.content, buffer.holds
    if isinstance(content, NamedContent):
        is_home = isinstance(rest, NamedContent) and rest.name == content.name
        if not is_home or holding.region != whole(buffer):
            return f"holds the value {content.name}, which stands in its own buffer alone"
    if not is_between_steps:
        return None
    if not isinstance(content, Zeros) and content.version:
        return "holds a later version between two steps, where every version is 0"
    if _is_cleared(content):
        is_gradient = isinstance(rest, Zeros) or getattr(rest, "quantity", None) == GRAD
        is_true = is_gradient or not buffer.is_persistent
    else:
        if isinstance(content, FlatContent) and content.quantity == GRAD:
            return f"holds a gradient of {content.micro} micro-steps between two steps, where there is none"
        is_true = not buffer.is_persistent or _entails(buffer, holding)
    if is_true:
        return None
    return "holds something else than at rest between two steps, where nothing has written it yet"


def _is_cleared(content: Content) -> bool:
    """Whether memory that the engine clears holds the content before the first step."""
    match content:
        case Zeros():
            return True
        case FlatContent(quantity=quantity, micro=micro):
            return quantity == GRAD and micro in (Micro.PAST, Micro.STALE)
        case NamedContent():
            return False
        case _:
            assert_never(content)


def _entails(buffer: Buffer, holding: Holding) -> bool:
    """Whether a buffer at rest holds what a holding says of a part of it."""
    rest, content, region = buffer.holds, holding.content, holding.region
    if region == whole(buffer):
        return content == rest
    if not isinstance(rest, FlatContent) or not isinstance(content, FlatContent) or rest.shard:
        return False
    part = replace(rest, offset=rest.offset + region.offset, shard=region.shard)
    return content == part
