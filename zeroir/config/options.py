"""All options of a compilation: the rules between them, what follows from them, and how they are read and stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Final, Self

from pydantic import ValidationError, ValidationInfo, model_validator

from zeroir.config.effects import first_without_effect
from zeroir.config.field_types import STEP
from zeroir.config.groups import SEPARATOR, GroupError, GroupSpec, parse_groups
from zeroir.config.meshes import parse_mesh
from zeroir.config.offload_fields import (
    HOST,
    KEPT_ON_DISK,
    OPTIMIZER,
    disk_folders,
    named_places,
    place_of,
    without_folders,
)
from zeroir.config.option_fields import GivenOptions, OptionFields
from zeroir.config.texts import explain_validation, first_problem, text_of
from zeroir.errors import UserError
from zeroir.ir.amounts import parse_bytes
from zeroir.ir.mesh import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS, Axis, Mesh
from zeroir.ir.optimizers.catalogue import OPTIONS, WITH_STATES_OF_ELEMENTS, Algorithm
from zeroir.ir.optimizers.settings import Setting, Value

_IS_WRITTEN: Final = {"is_written": True}
"""The validation context for options that a program carries: an option without effect is no error there."""


class CompileOptions(OptionFields):
    """The options of a compilation, each valid beside the others."""

    @model_validator(mode="after")
    def _mesh_fits_world_size(self) -> Self:
        if self.mesh is not None and parse_mesh(self.mesh).world_size != self.world_size:
            ranks = parse_mesh(self.mesh).world_size
            raise ValueError(
                f"--mesh {self.mesh} has {ranks} ranks, but --world-size is {self.world_size}; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        declaration = self.optimizer.declaration
        problem = declaration.problem(dict(zip(declaration.hyper_names, self.hyper, strict=True)))
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _groups_are_valid(self, info: ValidationInfo) -> Self:
        try:
            specs = parse_groups(self.group)
        except GroupError as error:
            raise ValueError(f"--group {error}") from None
        for spec in specs:
            try:
                self._of_group(spec, info.context)
            except ValidationError as error:
                raise ValueError(f"--group {spec.text}: {first_problem(error)}") from None
        return self

    @model_validator(mode="after")
    def _all_have_effect(self, info: ValidationInfo) -> Self:
        if not info.context and (problem := self.without_effect) is not None:
            raise ValueError(problem)
        return self

    @property
    def without_effect(self) -> str | None:
        """A sentence on the first option that has no effect beside the others; None if each has one."""
        return first_without_effect(self)

    @property
    def device_mesh(self) -> Mesh:
        """The axes of the ranks: ``replicate`` and ``shard`` where a mesh is given, else ``dp``."""
        if self.mesh is not None:
            return parse_mesh(self.mesh)
        return Mesh(axes=(Axis(name=DATA_AXIS, size=self.world_size),))

    @property
    def replicas(self) -> int | None:
        """The number of groups of ranks that hold the same shards; None without a mesh."""
        return None if self.mesh is None else parse_mesh(self.mesh).size(REPLICATE_AXIS)

    def for_world_size(self, world_size: int) -> CompileOptions:
        """The options for another number of ranks. The groups of a mesh keep their size, and their number changes.

        Raises:
            UserError: if the number of ranks is no multiple of the size of a group.
        """
        mesh = None
        if self.mesh is not None:
            shard = self.device_mesh.size(SHARD_AXIS)
            if world_size % shard:
                raise UserError(
                    f"The mesh {self.mesh} has groups of {shard} ranks, so {world_size} ranks leave a part of a group "
                    f"over: start a multiple of {shard} ranks, or compile with another --mesh."
                )
            mesh = f"{REPLICATE_AXIS}={world_size // shard},{SHARD_AXIS}={shard}"
        values = {**self.model_dump(), "world_size": world_size, "mesh": mesh}
        return make_options(values, context=_IS_WRITTEN)

    def changed(self, **changes: object) -> CompileOptions:
        """The options with some of them replaced; the same options where none is given.

        Raises:
            UserError: where one of them is wrong, or has no effect beside the others.
        """
        return make_options({**self.model_dump(), **changes}) if changes else self

    @property
    def interleaved(self) -> int:
        """The number of micro-batches that run unit by unit; 1 where each has a micro-step of its own."""
        if self.order == STEP:
            return 1
        group = self.order.partition("=")[2]
        return int(group) if group else self.micro_steps

    @property
    def is_step_interleaved(self) -> bool:
        """Whether all micro-batches of a step run unit by unit."""
        return self.interleaved == self.micro_steps > 1

    @property
    def is_update_overlapped(self) -> bool:
        """Whether the update begins in the backward, which is possible if no decision waits for all gradients."""
        return self.overlap_update and not self.has_decision

    @property
    def has_decision(self) -> bool:
        """Whether the update waits for a decision about all gradients: clipping, or whether to skip the step."""
        return self.clip is not None or self.precision == "fp16"

    @property
    def may_speculate(self) -> bool:
        """Whether the host's update could begin before such a decision, and nothing says whether it shall."""
        is_of_host = OPTIMIZER in self.offload and OPTIMIZER not in self.kept_on_disk
        has_wide_states = self.optimizer_bits == 32
        return self.speculate is None and is_of_host and has_wide_states and self.has_decision

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.precision == "fp16" and self.loss_scale is None

    @property
    def first_loss_scale(self) -> float:
        """The loss scale of the first step; 1 where there is none."""
        if self.precision != "fp16":
            return 1.0
        return self.initial_loss_scale if self.loss_scale is None else self.loss_scale

    @property
    def is_offloaded_to_disk(self) -> bool:
        """Whether a disk keeps something that is offloaded, and host memory is its cache."""
        return any(
            place != HOST
            for place in (named_places(self.offload_to).values() or (self.offload_to,))
        )

    @property
    def kept_on_disk(self) -> tuple[str, ...]:
        """The kinds that are kept on a disk; gradients, which the next step of an update reads at once, never are."""
        return tuple(
            kind
            for kind in KEPT_ON_DISK
            if kind in self.offload and place_of(self.offload_to, kind) != HOST
        )

    @property
    def offload_folder(self) -> str | None:
        """The folder on the disk; None where there is none, or where the run is to name it."""
        return next(iter(disk_folders(self.offload_to)), None)

    def offloaded_units(self, kind: str) -> tuple[str, ...]:
        """The patterns of the units of which a kind is offloaded; none where all units' is.

        A pattern is for all kinds, or for the one before its colon.
        """
        kinds_and_patterns = (pattern.rpartition(":") for pattern in self.offload_units)
        return tuple(pattern for own, _, pattern in kinds_and_patterns if own in ("", kind))

    @property
    def page_optimizer_bytes(self) -> int | None:
        """The device memory for pages of the optimizer's states; None without pages."""
        return None if self.page_optimizer is None else parse_bytes(self.page_optimizer)

    @property
    def page_size_bytes(self) -> int:
        """The size of a page."""
        return parse_bytes(self.page_bytes)

    @property
    def host_cache_bytes(self) -> int:
        """The host memory that keeps a part of what would be on disk."""
        return 0 if self.host_cache is None else parse_bytes(self.host_cache)

    @property
    def prefetch_budget_bytes(self) -> int | None:
        """The device memory that early gathers may fill; None if ``prefetch`` sets the distance instead."""
        return None if self.prefetch_budget is None else parse_bytes(self.prefetch_budget)

    def _value(self, setting: Setting) -> Value:
        """The value of a setting of the optimizer, its default unless given."""
        given: Value | None = None if setting.fixed is not None else getattr(self, setting.name)
        return setting.default if given is None else given

    @property
    def effective_weight_decay(self) -> float:
        """The weight decay: the default of the optimizer unless given."""
        return dict(zip(self.optimizer.hyper_names, self.hyper, strict=True))["weight_decay"]

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups of ``group``, which the parameters that match no other group are not in."""
        return parse_groups(self.group)

    def of_group(self, spec: GroupSpec) -> CompileOptions:
        """The options of a group's parameters.

        A group with another optimizer takes over the learning rate, the weight decay, and the bits of its states alone,
        and these only where its states are those of single elements.
        """
        return self._of_group(spec, _IS_WRITTEN)

    def with_usual_optimizer(self) -> CompileOptions:
        """The options of parameters that the optimizer does not take: the usual one's, and the same learning rate.

        The weight decay is the same, too, where it is given.
        """
        values = {"lr": self.lr, "weight_decay": self.weight_decay, "world_size": 1}
        return CompileOptions.model_validate(values, context=_IS_WRITTEN)

    def without_decay(self) -> CompileOptions:
        """The same options with a weight decay of 0."""
        return self.model_copy(update={"weight_decay": 0.0})

    def _of_group(self, spec: GroupSpec, context: Mapping[str, bool] | None) -> CompileOptions:
        names = ("optimizer", "optimizer_bits", "lr", *OPTIONS)
        values = {name: getattr(self, name) for name in names}
        optimizer = spec.settings.get("optimizer", self.optimizer)
        if optimizer != self.optimizer:
            values = {name: values[name] for name in ("lr", "weight_decay")}
            if optimizer in WITH_STATES_OF_ELEMENTS:
                values["optimizer_bits"] = self.optimizer_bits
        update = {**values, **spec.settings, "world_size": 1}
        return CompileOptions.model_validate(update, context=context)

    @property
    def hyper(self) -> tuple[float, ...]:
        """The contents of ``%hyper``, in the order of ``Algorithm.hyper_names``."""
        return tuple(
            number
            for setting in self.optimizer.declaration.settings
            for number in setting.numbers(self._value(setting))
        )

    def to_pairs(self) -> tuple[tuple[str, str], ...]:
        """The options as a program stores them: names and texts, sorted by name, without options that are not set.

        The folder of ``offload_to`` is left out: it is a matter of the machine that runs the program.
        """
        places = without_folders(self.offload_to)
        values = sorted({**self.model_dump(), "offload_to": places}.items())
        texts = ((name, text_of(value, _SEPARATORS.get(name, ","))) for name, value in values)
        are_set = (value not in (None, ()) for _, value in values)
        return tuple(compress(texts, are_set))


_SEPARATORS: Final = {"group": SEPARATOR}
"""Separators of options that are lists, where commas are part of an item."""


def make_options(
    values: Mapping[str, object], *, context: Mapping[str, bool] | None = None
) -> CompileOptions:
    """Validate options; a UserError names the first wrong one, its value and the expected values."""
    try:
        return CompileOptions.model_validate(dict(values), context=context)
    except ValidationError as error:
        raise UserError(explain_validation(error)) from None


def make_given_options(values: Mapping[str, object]) -> GivenOptions:
    """Validate each option by itself; UserError as for ``make_options``."""
    try:
        return GivenOptions.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(explain_validation(error)) from None


def options_from_pairs(pairs: Iterable[tuple[str, str]]) -> CompileOptions:
    """The inverse of ``CompileOptions.to_pairs``; UserError as for ``make_options``.

    Files of earlier versions have the options of every optimizer; those of other optimizers are left out.
    """
    values = dict(pairs)
    optimizer = values.get("optimizer")
    if optimizer in set(Algorithm):
        for name, option in OPTIONS.items():
            if optimizer not in option.settings:
                values.pop(name, None)
    try:
        return CompileOptions.model_validate_strings(values, context=_IS_WRITTEN)
    except ValidationError as error:
        raise UserError(explain_validation(error)) from None
