"""The origin of the contents before the first step: only the engine initialises buffers.

Each section is proved from its entry state, and each exit state implies the next entry state. What remains is the
start. Before the first step the engine fills parameters, master weights and module buffers, binds inputs, draws seeds,
sets scalars and clears all other memory; it gathers buffers that are live across the boundary between two steps. Any
other content that a program assumes at the start would be memory that nothing has written.

So a named value has one home, the buffer that is bound to it: a copy elsewhere would be wrong as soon as the host
changes the home. And a role, which says what the host does with a buffer, must match the buffer's content and binding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from zeroir.ir.buffers import Buffer, Role, whole
from zeroir.ir.contents import (
    GRAD,
    MASTER,
    PARAM,
    Content,
    FlatContent,
    Micro,
    NamedContent,
    SnapshotContent,
    WeightContent,
    Zeros,
)
from zeroir.ir.dtypes import DType
from zeroir.ir.output_paths import OutputPathError, structured
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    Holding,
    InputBinding,
    OutputBinding,
    Program,
    Section,
    State,
)
from zeroir.verify.context import spell
from zeroir.verify.equivalence.slices import is_sliced, slice_numel

INPUT, OUTPUT = "an input", "an output"
MODULE_BUFFER, INITIAL = "a module buffer", "an initial value"
_BOUND_TO = {
    Role.INPUT: INPUT,
    Role.OUTPUT: OUTPUT,
    Role.MODULE_BUFFER: MODULE_BUFFER,
    Role.CONSTANT: MODULE_BUFFER,
    Role.SCALAR: INITIAL,
}
"""The kind of binding of buffers of each role. The engine draws seeds for ``rng``, and clears outputs and other
scalars."""


Problems = Iterator[tuple[str, str]]
"""Codes and messages."""


def provenance_problems(program: Program) -> Problems:
    """Check bindings, roles, and the contents at rest and between two steps."""
    yield from _binding_problems(program)
    yield from _evaluation_problems(program)
    kinds = {name: kind for _, name, kind in _bound(program)}
    homes: dict[str, str] = {}
    for buffer in program.buffers:
        for sentence in _role_problems(program, buffer, kinds.get(buffer.name)):
            yield "Z008", f"buffer %{buffer.name} {sentence}"
        if isinstance(buffer.holds, WeightContent) and buffer.holds.micro is Micro.CURRENT:
            problem = _weight_problem(program, buffer)
            if problem is not None:
                yield "Z402", f"buffer %{buffer.name} {problem}"
        if isinstance(buffer.holds, NamedContent):
            home = homes.setdefault(buffer.holds.name, buffer.name)
            if home != buffer.name:
                what = f"rests with the value {buffer.holds.name}, whose home is %{home}"
                yield "Z008", f"buffer %{buffer.name} {what}: nothing keeps the two alike"
    for section in program.sections:
        for state in (section.entry, section.exit):
            for holding in state.holdings:
                held = program.buffer_by_name.get(holding.region.buffer)
                if held is None:
                    continue
                why = _holding_problem(
                    held, holding, is_between_steps=_is_between_steps(section, state)
                )
                if why is not None:
                    where = spell(holding.region, program)
                    yield "Z008", f"in a state of {section.name} {where} {why}"


def _is_between_steps(section: Section, state: State) -> bool:
    """Return whether a state of a section can be the one before the first step."""
    if section.name in (MICRO_STEP, EVALUATE, SAVE):
        return True
    return state is (section.entry if section.name == LAST_MICRO_STEP else section.exit)


def _evaluation_problems(program: Program) -> Problems:
    """Check that the loss and the outputs of ``evaluate`` have their own buffers, and each output one path."""
    if EVALUATE not in program.section_by_name and (
        program.eval_loss is not None or not all(each.is_of_steps for each in program.outputs)
    ):
        yield (
            "Z008",
            "the program names a loss or outputs of an evaluation, but has no section evaluate",
        )
    loss = program.eval_loss
    if loss is not None and loss in (program.loss, program.batch_loss):
        yield (
            "Z008",
            f"%{loss} is the loss of micro-steps and of evaluations: an evaluation would change a step",
        )
    try:
        structured([(each.path, None) for each in program.outputs if each.stored is None])
    except OutputPathError as error:
        yield "Z008", f"the outputs {error}"
    stored = Counter((each.path, each.stored) for each in program.outputs if each.stored)
    for (path, moment), count in stored.items():
        if count > 1:
            yield "Z002", f"the output {path} of each {moment} is stored twice"


def _bound(program: Program) -> Iterator[tuple[str, str, str]]:
    """Yield the bindings of buffers to the outside: the name for messages, the buffer, and the kind."""
    for given in program.inputs:
        yield f"input {given.path}", given.buffer, INPUT
    for output in program.outputs:
        yield f"output {output.path}", output.buffer, OUTPUT
    for held in program.module_buffers:
        yield f"module buffer {held.name}", held.buffer, MODULE_BUFFER
    if program.rank is not None:
        yield "the rank", program.rank, MODULE_BUFFER
    for scalar in program.scalars:
        yield f"the initial value of %{scalar.buffer}", scalar.buffer, INITIAL


def _binding_problems(program: Program) -> Problems:
    filled: dict[str, str] = {}
    for what, name, _ in _bound(program):
        if name in filled:
            yield "Z002", f"{what} is bound to %{name}, which {filled[name]} fills already"
        filled.setdefault(name, what)
    for names, kind in (
        (
            [
                *(given.path for given in program.inputs),
                *(constant.path for constant in program.batch_constants),
            ],
            "input",
        ),
        ([held.name for held in program.module_buffers], "module buffer"),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield "Z002", f"{kind} {name} is bound twice"
    tensors: list[tuple[str, InputBinding | OutputBinding]] = [
        (f"input {given.path}", given) for given in program.inputs
    ]
    tensors += [(f"output {output.path}", output) for output in program.outputs]
    for what, binding in tensors:
        buffer = program.buffer_by_name.get(binding.buffer)
        if buffer is None:
            continue
        numel = math.prod(binding.shape)
        is_as_long = buffer.numel == numel
        slices = ""
        if isinstance(binding, InputBinding) and program.interleaved > 1:
            is_as_long = slice_numel(program, buffer.name) >= numel
            slices = f" in {program.interleaved} slices"
        if buffer.dtype is not binding.dtype or not is_as_long:
            kind = f"{what} is {binding.dtype}{list(binding.shape)}"
            yield "Z008", f"{kind}, and %{buffer.name} holds {buffer.dtype}[{buffer.numel}]{slices}"
    for held in program.module_buffers:
        buffer = program.buffer_by_name.get(held.buffer)
        if buffer is None:
            continue
        what, where = f"module buffer {held.name}", f"and %{buffer.name} holds"
        if buffer.numel != math.prod(held.shape):
            yield "Z008", f"{what} is {list(held.shape)}, {where} {buffer.numel} elements"
        if held.data is not None and len(held.data) != buffer.size_bytes:
            yield "Z008", f"{what} has {len(held.data)} bytes of data, {where} {buffer.size_bytes}"


def _role_problems(program: Program, buffer: Buffer, bound: str | None) -> Iterator[str]:
    """Yield why a buffer's role contradicts its resting content or its binding (an input, a module buffer, …)."""
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
    if is_sliced(program, buffer) and buffer.numel % program.interleaved:
        yield f"has {buffer.numel} elements, which {program.interleaved} micro-batches do not share equally"
    is_named = role is Role.RNG or wanted is not None
    if isinstance(holds, WeightContent):
        if role is not Role.SCALAR:
            yield f"rests with a weight, which only a scalar does, but has the role {role}"
        if holds.micro is Micro.ALL or (holds.micro is Micro.CURRENT and holds.reduced):
            yield "rests with a sum of weights that no micro-step has made yet"
        count = program.interleaved if holds.micro is Micro.CURRENT else 1
        if (buffer.dtype, buffer.numel) != (DType.F32, count):
            yield f"rests with a weight, which is f32[{count}], but is {buffer.dtype}[{buffer.numel}]"
    elif is_named and not isinstance(holds, NamedContent):
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
    if isinstance(holds, SnapshotContent) is not (role is Role.SNAPSHOT):
        yield f"has the role {role}, and a snapshot is what a buffer of the role {Role.SNAPSHOT} rests with"
    if isinstance(holds, Zeros) and role is not Role.GRAD:
        yield f"rests with zeros, which only a gradient does, but has the role {role}"
    if isinstance(holds, NamedContent | FlatContent) and holds.version:
        yield f"rests with version {holds.version} of its content: at rest every version is 0"
    if isinstance(holds, FlatContent) and holds.micro in (Micro.CURRENT, Micro.ALL):
        yield f"rests with a gradient of {holds.micro} micro-steps: before a step there is none"


def _weight_problem(program: Program, buffer: Buffer) -> str | None:
    """Return why a buffer does not hold the weight of each micro-batch, which the host writes or is always 1."""
    if program.weight is not None:
        if buffer.name == program.weight:
            return None
        return f"rests with the weight of a micro-batch, which the host writes to %{program.weight}"
    values = next((s.values for s in program.scalars if s.buffer == buffer.name), (0.0,))
    wrong = next((value for value in values if value != 1), None)
    if wrong is None:
        return None
    return f"rests with the weight of a micro-batch, which is 1, but begins with {wrong:g}"


def _holding_problem(buffer: Buffer, holding: Holding, *, is_between_steps: bool) -> str | None:
    """Return why no memory has the contents that a holding declares."""
    content, rest = holding.content, buffer.holds
    if isinstance(content, WeightContent) and content.micro is Micro.CURRENT and content != rest:
        return "holds the weight of the present micro-batch, which only its own buffer holds"
    if isinstance(content, NamedContent):
        is_home = isinstance(rest, NamedContent) and rest.name == content.name
        if not is_home or holding.region != whole(buffer):
            return f"holds the value {content.name}, which only its own buffer holds"
    if isinstance(content, SnapshotContent):
        return "is described as a snapshot, which only the declaration of a buffer does"
    if not is_between_steps:
        return None
    if isinstance(content, NamedContent | FlatContent) and content.version:
        return "holds a later version between two steps, where every version is 0"
    if _is_cleared(content):
        is_gradient = isinstance(rest, Zeros) or getattr(rest, "quantity", None) == GRAD
        is_sum = isinstance(rest, WeightContent) and rest.micro is not Micro.CURRENT
        is_true = is_gradient or is_sum or not buffer.is_persistent
    else:
        if isinstance(content, WeightContent) and content.micro is Micro.ALL:
            return "holds the weight of a step between two steps, where there is none"
        if isinstance(content, FlatContent) and content.quantity == GRAD:
            return f"holds a gradient of {content.micro} micro-steps between two steps, where there is none"
        is_true = not buffer.is_persistent or _entails(buffer, holding)
    if is_true:
        return None
    return "holds another content than at rest between two steps, where nothing has written it yet"


def _is_cleared(content: Content) -> bool:
    """Return whether cleared memory has the content before the first step."""
    match content:
        case Zeros():
            return True
        case WeightContent(micro=micro):
            return micro in (Micro.PAST, Micro.STALE)
        case FlatContent(quantity=quantity, micro=micro):
            return quantity == GRAD and micro in (Micro.PAST, Micro.STALE)
        case NamedContent() | SnapshotContent():
            return False
        case _:
            assert_never(content)


def _entails(buffer: Buffer, holding: Holding) -> bool:
    """Return whether a buffer at rest has the content that a holding declares for a part of it."""
    rest, content, region = buffer.holds, holding.content, holding.region
    if region == whole(buffer):
        return content == rest
    if not isinstance(rest, FlatContent) or not isinstance(content, FlatContent) or rest.shard:
        return False
    part = replace(rest, offset=rest.offset + region.offset, shard=region.shard)
    return content == part
