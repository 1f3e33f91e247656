"""The optimizer groups of a model: the parameters of each group, and the options with which they are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroir.config import CompileOptions
from zeroir.config.groups import DEFAULT_GROUP, NO_DECAY
from zeroir.config.optimizer import OptimizerOptions
from zeroir.errors import UserError
from zeroir.ir.layout import Parameter
from zeroir.ir.optimizers.catalogue import USUAL, Algorithm
from zeroir.ir.optimizers.forms import StateForm, form_of_bits
from zeroir.ir.program import Flat, OptimizerGroup

MATRIX_DIMENSIONS = 2

FEWEST_DECAYED_DIMENSIONS = 2
"""With ``no_decay``, parameters of fewer dimensions than this have no weight decay: norms and biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """A group that has parameters; ``options`` say how they are updated."""

    name: str
    options: OptimizerOptions
    parameters: tuple[str, ...]

    @property
    def lr_buffer(self) -> str:
        """The scalar buffer of the learning rate."""
        return "lr" if self.name == DEFAULT_GROUP else f"lr.{self.name}"

    @property
    def hyper_buffer(self) -> str:
        """The scalar buffer of the other hyper-parameters."""
        return "hyper" if self.name == DEFAULT_GROUP else f"hyper.{self.name}"


def parameter_groups(
    parameters: Iterable[Parameter], options: CompileOptions, frozen: Iterable[Parameter] = ()
) -> tuple[ParameterGroup, ...]:
    """Return the groups that have trained parameters: first those in no group, then the others in the order given.

    ``parameters`` are the trained ones, and ``frozen`` the others. A parameter is in the first group that matches one
    of its names.

    Raises:
        UserError: if no parameter is in a group, or if two groups have the same name.
    """
    parameters = tuple(parameters)
    specs = options.groups
    members: dict[str, list[Parameter]] = {DEFAULT_GROUP: []}
    members.update((spec.name, []) for spec in specs)
    matched: set[str] = set()
    for parameter in parameters:
        names = (parameter.name, *parameter.aliases)
        matching = [spec.name for spec in specs if spec.matches(names)]
        matched.update(matching)
        members[matching[0] if matching else DEFAULT_GROUP].append(parameter)
    idle = [(parameter.name, *parameter.aliases) for parameter in frozen]
    for spec in specs:
        if not members[spec.name] and not any(map(spec.matches, idle)):
            raise UserError(_empty(spec.text, parameters, is_matched=spec.name in matched))
    own, is_split = options.optimizer, options.optimizer.no_decay
    groups = _split(DEFAULT_GROUP, members[DEFAULT_GROUP], own, no_decay=is_split)
    for spec in specs:
        no_decay = is_split and "weight_decay" not in spec.settings
        own_options = own.of_group(spec.settings)
        groups += _split(spec.name, members[spec.name], own_options, no_decay=no_decay)
    for name, count in Counter(group.name for group in groups).items():
        if count > 1:
            raise UserError(f"Two groups have the name {name}: give one of them another by name=.")
    return tuple(groups)


def _split(
    name: str, parameters: Sequence[Parameter], options: OptimizerOptions, *, no_decay: bool
) -> list[ParameterGroup]:
    """Return a group, and one with the default optimizer for the parameters that its optimizer does not support."""
    taken = list(parameters)
    if options.algorithm.takes_matrices_alone:
        taken = [p for p in parameters if len(p.shape) == MATRIX_DIMENSIONS]
    groups = _split_by_decay(name, taken, options, is_split=no_decay)
    left = [p for p in parameters if p not in taken]
    if left:
        left_name = str(USUAL) if name == DEFAULT_GROUP else f"{name}.{USUAL}"
        usual_options = options.with_usual_optimizer()
        groups += _split_by_decay(left_name, left, usual_options, is_split=no_decay)
    return groups


def _split_by_decay(
    name: str, parameters: Sequence[Parameter], options: OptimizerOptions, *, is_split: bool
) -> list[ParameterGroup]:
    """Return a group, or two where it is split by weight decay; empty ones are omitted."""
    undecayed: set[str] = set()
    if is_split and options.effective_weight_decay:
        undecayed.update(p.name for p in parameters if len(p.shape) < FEWEST_DECAYED_DIMENSIONS)
    undecayed_name = NO_DECAY if name == DEFAULT_GROUP else f"{name}.{NO_DECAY}"
    parts = (
        ParameterGroup(
            name=name,
            options=options,
            parameters=tuple(p.name for p in parameters if p.name not in undecayed),
        ),
        ParameterGroup(
            name=undecayed_name,
            options=options.without_decay(),
            parameters=tuple(p.name for p in parameters if p.name in undecayed),
        ),
    )
    return [part for part in parts if part.parameters]


def _empty(text: str, parameters: Sequence[Parameter], *, is_matched: bool) -> str:
    if is_matched:
        return f"--group {text} has no parameters left: groups before it match all of them."
    names = [parameter.name for parameter in parameters]
    example = names[len(names) // 2] if names else "layers.0.weight"
    return f"--group {text} matches no trained parameter or module with trained parameters; names look like {example}."


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KeptStates:
    """The optimizer's states of a parameter: those of its algorithm, in some form, with a count of its steps."""

    algorithm: Algorithm
    form: StateForm
    count: int = 0

    @property
    def step_buffer(self) -> str:
        """The scalar buffer of the count of steps."""
        return f"step.{self.count}" if self.count else "step"


def kept_states(
    groups: Iterable[ParameterGroup], step_counts: Mapping[str, int]
) -> Mapping[str, KeptStates]:
    """Return the optimizer's states of each parameter; ``step_counts`` are those of ``ModelSource``."""
    return {
        name: replace(states_of(group.options), count=step_counts.get(name, 0))
        for group in groups
        for name in group.parameters
    }


def states_of(options: OptimizerOptions) -> KeptStates:
    """Return the states of the optimizer of these options."""
    form = StateForm.FP32
    if options.algorithm.has_states_of_elements:
        form = form_of_bits(options.bits)
    return KeptStates(algorithm=options.algorithm, form=form)


def declared_groups(
    groups: Sequence[ParameterGroup], flats: Iterable[Flat]
) -> tuple[OptimizerGroup, ...]:
    """Return the groups of a program with these trained flats.

    Between parameters an interval ends where the next parameter starts, so intervals cover the padding as well.
    """
    group_of = {name: group.name for group in groups for name in group.parameters}
    intervals: dict[str, list[tuple[str, int, int]]] = {group.name: [] for group in groups}
    for flat in flats:
        slots = sorted(flat.slots, key=lambda slot: (slot.offset, slot.numel))
        starts = [0, *(slot.offset for slot in slots[1:])]
        for slot, start, stop in zip(slots, starts, (*starts[1:], flat.padded_numel), strict=True):
            own = intervals[group_of[slot.name]]
            if start == stop:
                continue
            if own and own[-1][0] == flat.name and own[-1][2] == start:
                own[-1] = (flat.name, own[-1][1], stop)
            else:
                own.append((flat.name, start, stop))
    return tuple(
        OptimizerGroup(
            name=group.name,
            algorithm=group.options.algorithm,
            intervals=tuple(intervals[group.name]),
            lr=group.lr_buffer,
            hyper=group.hyper_buffer,
        )
        for group in groups
    )
