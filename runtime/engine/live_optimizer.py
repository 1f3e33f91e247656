"""The optimizer groups of a running program as a ``torch.optim.Optimizer``.

Changed settings apply from the next update.

``param_groups`` have the settings that torch's optimizer of the same name has (``lr``, ``betas``, ``weight_decay``, …),
so every ``torch.optim.lr_scheduler`` drives them unchanged. Before an update, changed settings are written to the
scalar buffers of their group, which the program reads; nothing is recompiled. The optimizer has neither parameters nor
states: their shards are in the buffers of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Final, overload

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.buffers import Region, whole
from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.settings import LEARNING_RATE, Setting, Value
from zeroir.ir.program import Program
from zeroir.runtime.comm.job import Job, PeerError
from zeroir.runtime.memory.rank_memory import RankMemory

Settings = tuple[float, ...]
"""The learning rate of a group, followed by the hyper-parameters of its algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveGroup:
    """A group of the program: the buffers of its settings, and the names and shapes of its parameters."""

    name: str
    algorithm: Algorithm
    lr: Region
    hyper: Region
    parameters: Sequence[tuple[str, tuple[int, ...]]]

    @property
    def places(self) -> Iterator[tuple[Setting, str, int | None]]:
        """For each number of the settings, its key in torch's group, and its index if the key has several numbers."""
        for setting in (LEARNING_RATE, *self.algorithm.declaration.settings):
            for key, index in setting.torch_places:
                yield setting, key, index


class LiveOptimizer(torch.optim.Optimizer):
    """The settings of a program's optimizer groups as a ``torch.optim.Optimizer``.

    Each group has the keys of torch's optimizer, ``name``, ``param_names``, and ``params``: tensors of the parameters'
    shapes on the meta device. All ranks must give the groups the same settings. ``update`` finishes a step whose
    micro-steps have been taken.

    Raises:
        UserError: where the program updates nothing.
    """

    def __init__(
        self, program: Program, memories: Iterable[RankMemory], update: Callable[[], object]
    ) -> None:
        self._memories = list(memories)
        self._groups = _groups(program)
        self._update = update
        self._is_reported = False
        self._is_complete = False
        if not self._groups:
            raise UserError("The program updates no parameter, so it has no optimizer.")
        first = {scalar.buffer: scalar.values for scalar in program.scalars}
        self._written = [_first_settings(group, first) for group in self._groups]
        super().__init__(
            [
                _param_group(group, settings)
                for group, settings in zip(self._groups, self._written, strict=True)
            ],
            dict(_as_torch_has_them(self._groups[0], self._written[0])),
        )
        self._is_complete = True

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of the groups, in the order of ``param_groups``."""
        return tuple(group.name for group in self._groups)

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The algorithms of the groups, in the order of ``param_groups``."""
        return tuple(group.algorithm for group in self._groups)

    def settings(self) -> list[Settings]:
        """Return the present settings of each group.

        Raises:
            UserError: where a setting has an invalid value.
        """
        if len(self.param_groups) != len(self._groups):
            raise UserError(
                f"engine.optimizer has {len(self.param_groups)} groups, but the program was compiled with "
                f"{len(self._groups)}: compile it again with other groups."
            )
        return [
            _settings(group, param_group)
            for group, param_group in zip(self._groups, self.param_groups, strict=True)
        ]

    def require(self, updates: Sequence[Mapping[str, object]]) -> None:
        """Check these changes to the settings, in the order of ``param_groups``.

        Raises:
            UserError: where a setting has an invalid value.
        """
        self.settings()
        for group, present, update in zip(self._groups, self.param_groups, updates, strict=True):
            _require_valid(group, _settings(group, {**present, **update}))

    def write(self) -> None:
        """Write the settings that changed since the last write, on every local rank.

        Raises:
            UserError: where a setting has an invalid value; then nothing is written.
        """
        settings = self.settings()
        if settings == self._written:
            return
        for group, new in zip(self._groups, settings, strict=True):
            _require_valid(group, new)
        for group, new, old in zip(self._groups, settings, self._written, strict=True):
            for memory in self._memories if group.parameters else ():
                if new[0] != old[0]:
                    memory.region(group.lr).fill_(new[0])
                if new[1:] != old[1:]:
                    memory.region(group.hyper).copy_(torch.tensor(new[1:], dtype=torch.float64))
        self._written = settings

    def go_on_with(self, program: Program, memories: Iterable[RankMemory]) -> None:
        """Drive another program from now on, starting with all settings.

        A group none of whose parameters it trains keeps its place and its settings without parameters.
        """
        self._memories = list(memories)
        present = {group.name: group for group in _groups(program)}
        groups = [present.pop(group.name, replace(group, parameters=())) for group in self._groups]
        first = {scalar.buffer: scalar.values for scalar in program.scalars}
        self._groups = [*groups, *present.values()]
        for param_group, group in zip(self.param_groups, groups, strict=True):
            if param_group["param_names"] != [name for name, _ in group.parameters]:
                param_group.update(_members(group))
        for group in present.values():
            settings = _first_settings(group, first)
            self._written.append(settings)
            self.param_groups.append(_param_group(group, settings))
        self.forget_written()

    def forget_written(self) -> None:
        """Note that the scalar buffers may have other values, so that all settings are to be written."""
        self._written = [(math.nan,) * len(settings) for settings in self._written]

    def report_update(self) -> None:
        """Notify schedulers and the hooks of ``step`` of an update by the engine."""
        self._is_reported = True
        try:
            self.step()
        finally:
            self._is_reported = False

    # -------------------------------------------------------------------------------------------- as in torch.optim

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Finish the step whose micro-steps have been taken.

        Raises:
            UserError: with a closure, or where no micro-step has been taken.
        """
        if closure is not None:
            raise UserError(
                "engine.optimizer.step takes no closure: take whole steps by engine.step(batch)."
            )
        if not self._is_reported:
            self._update()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every step starts with new gradients."""

    def add_param_group(self, param_group: Mapping[str, object]) -> None:
        """Reject another group, because groups are part of the program.

        Raises:
            UserError: always, for a caller other than the constructor.
        """
        if self._is_complete:
            raise UserError(
                "engine.optimizer takes no further groups, which are part of the program: compile it again with them."
            )
        # torch's own method adds the settings of the first group, which others may not have, and imports torch's
        # compiler.
        self.param_groups.append(dict(param_group))

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load the settings that ``state_dict`` returned; the states of parameters belong to checkpoints.

        Raises:
            UserError: where there are states of parameters, or other groups.
        """
        if state_dict.get("state"):
            raise UserError(
                "engine.optimizer.load_state_dict takes the settings of groups alone, but got states of parameters, "
                "which belong to checkpoints."
            )
        groups = state_dict.get("param_groups")
        count = len(groups) if isinstance(groups, list) else 0
        if count != len(self._groups):
            raise UserError(
                f"engine.optimizer has {len(self._groups)} groups, but the state to load has {count}."
            )
        try:
            super().load_state_dict(dict(state_dict))
        except ValueError as error:
            raise UserError(
                f"engine.optimizer cannot take over these settings: {error}."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsOfRanks:
    """Writes the settings of an optimizer before each step of a rank, and compares them with those of other ranks.

    The number of micro-steps so far is compared as well, because each rank divides by that of its own step. The
    comparison exchanges a few numbers between all ranks. It runs at steps 1, 2, 4, and so on, and from
    ``COMPARED_EVERY`` on at each multiple of it, so its cost is negligible.
    """

    optimizer: LiveOptimizer
    job: Job

    def before_micro_step(self, step: int, *, micro_steps: int, is_last: bool) -> None:
        """Write changed settings, for a step that is counted from 1.

        Raises:
            UserError: where a setting is invalid, or where two ranks have different ones, or took different numbers of
                micro-steps.
        """
        self.optimizer.write()
        if is_last and not self.job.is_alone and _is_compared(step):
            settings = self.optimizer.settings()
            own = [float(micro_steps), *(value for group in settings for value in group)]
            counts, rows = zip(*((row[0], row[1:]) for row in self.job.exchange(own)), strict=True)
            _require_same_counts(counts, step, self.job.rank)
            owners = [
                group
                for group, own in zip(self.optimizer.group_names, settings, strict=True)
                for _ in own
            ]
            _require_same(owners, rows, self.job.rank)

    def after_update(self) -> None:
        """Report the update to the optimizer."""
        self.optimizer.report_update()


COMPARED_EVERY: Final = 128


def _is_compared(step: int) -> bool:
    return step % COMPARED_EVERY == 0 or (step < COMPARED_EVERY and step & (step - 1) == 0)


def _require_same_counts(counts: Sequence[float], step: int, own_rank: int) -> None:
    """Raise an error where two ranks took different numbers of micro-steps up to the last one of a step."""
    for rank, count in enumerate(counts):
        if count != counts[0]:
            kind = UserError if rank == own_rank else PeerError
            raise kind(
                f"Rank {rank} took {count:.0f} micro-steps until the end of step {step}, but rank 0 took "
                f"{counts[0]:.0f}: take equally many micro-steps in each step on all ranks."
            )


def _require_same(owners: Sequence[str], rows: Sequence[Sequence[float]], own_rank: int) -> None:
    """Raise an error where two rows differ; ``owners`` are the groups of their values."""
    for rank, row in enumerate(rows):
        for group, value, first in zip(owners, row, rows[0], strict=True):
            if value != first:
                kind = UserError if rank == own_rank else PeerError
                raise kind(
                    f"Rank {rank} has another setting of the optimizer's group {group} than rank 0, {value:g} instead "
                    f"of {first:g}: set the same on all ranks, and give a scheduler only what is the same on all."
                )


# ------------------------------------------------------------------------------------------------------------ groups


def _groups(program: Program) -> list[_LiveGroup]:
    """Return the groups of the program's header, with the settings at the places that it declares."""
    parameters: dict[str, list[tuple[str, tuple[int, ...]]]] = {g.name: [] for g in program.groups}
    intervals: dict[str, list[tuple[int, int, str]]] = {flat.name: [] for flat in program.flats}
    for group in program.groups:
        for flat_name, start, stop in group.intervals:
            intervals[flat_name].append((start, stop, group.name))
    for flat in program.flats:
        owners = iter(sorted(intervals[flat.name]))
        owner = next(owners, None)
        for slot in sorted(flat.slots, key=lambda slot: (slot.offset, slot.numel)):
            while owner is not None and owner[1] <= slot.offset:
                owner = next(owners, None)
            if owner is not None and owner[0] <= slot.offset:
                parameters[owner[2]].append((slot.name, slot.shape))
    return [
        _LiveGroup(
            name=group.name,
            algorithm=group.algorithm,
            lr=whole(program.buffer_by_name[group.lr]),
            hyper=whole(program.buffer_by_name[group.hyper]),
            parameters=parameters[group.name],
        )
        for group in program.groups
    ]


def _param_group(group: _LiveGroup, settings: Settings) -> dict[str, object]:
    """Return a group as torch's optimizers have it."""
    return {**_members(group), "name": group.name, **_as_torch_has_them(group, settings)}


def _members(group: _LiveGroup) -> dict[str, object]:
    return {
        "params": [_placeholder(shape) for _, shape in group.parameters],
        "param_names": [name for name, _ in group.parameters],
    }


def _placeholder(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta", requires_grad=True)


# ---------------------------------------------------------------------------------------------------------- settings


def _first_settings(group: _LiveGroup, first: Mapping[str, tuple[float, ...]]) -> Settings:
    """Return the settings before the first step; a scalar without a value is 0."""
    values: list[float] = []
    for region in (group.lr, group.hyper):
        of_buffer = first.get(region.buffer, (0.0,) * region.stop)
        values += of_buffer[region.offset : region.stop]
    return tuple(values)


def _as_torch_has_them(group: _LiveGroup, settings: Settings) -> Mapping[str, Value]:
    """Return the settings of a group under the keys of torch's optimizers."""
    lr, *hyper = settings
    return {"lr": lr, **group.algorithm.declaration.torch_settings(hyper)}


def _settings(group: _LiveGroup, param_group: Mapping[str, object]) -> Settings:
    """Return the settings of a group as the program stores them.

    Raises:
        UserError: where one is missing or not a number.
    """
    numbers: list[float] = []
    for setting, key, index in group.places:
        value = given = param_group.get(key)
        if index is not None:
            is_long = isinstance(given, tuple | list) and len(given) > index
            value = given[index] if isinstance(given, tuple | list) and is_long else None
        elif setting.choices:
            value = _number_of_choice(setting, given)
        if not isinstance(value, float):
            value = _number(group, setting, key, value, given)
        numbers.append(value)
    return tuple(numbers)


def _number_of_choice(setting: Setting, given: object) -> float | None:
    """Return the number of a choice, the default for None as in torch; None where it is not a choice."""
    choice = setting.default if given is None else given
    return float(setting.choices.index(choice)) if choice in setting.choices else None


def _number(group: _LiveGroup, setting: Setting, key: str, value: object, given: object) -> float:
    """Convert a value that is not a float to one; ``given`` is the whole value under the key.

    Raises:
        UserError: where it is not a number.
    """
    if isinstance(value, Tensor):
        raise _invalid(group, key, "a tensor", "a number, which needs no wait for the device")
    if isinstance(value, Real):
        return float(value)
    count = sum(other == key for _, other, _ in group.places)
    expected = "a number" if count == 1 else f"{count} numbers"
    raise _invalid(group, key, repr(given), setting.expected if setting.choices else expected)


def _require_valid(group: _LiveGroup, settings: Settings) -> None:
    """Raise UserError for the first setting that is out of its range, or inconsistent with the others."""
    declaration = group.algorithm.declaration
    values = dict(zip(("lr", *declaration.hyper_names), settings, strict=True))
    for (setting, *_), (name, value) in zip(group.places, values.items(), strict=True):
        if setting.fixed is not None and (value,) != setting.numbers(setting.default):
            found, only = setting.value(value), setting.default
            raise _invalid(group, name, repr(found), f"{only!r}, because {setting.fixed}")
        if not math.isfinite(value):
            raise _invalid(group, name, repr(value), "finite")
        if not setting.allows(value):
            raise _invalid(group, name, repr(value), setting.expected)
    problem = declaration.problem(values)
    if problem is not None:
        raise UserError(f"In group {group.name} of engine.optimizer {problem}.")


def _invalid(group: _LiveGroup, name: str, found: str, expected: str) -> UserError:
    return UserError(
        f"{name} of group {group.name} of engine.optimizer is {found}, but should be {expected}."
    )
