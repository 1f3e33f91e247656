"""The options of a compilation as one object, and what follows from several of them together."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, PrivateAttr, model_validator

from zeroir.config.communication import Communication, Prefetch, Unshard
from zeroir.config.field_types import (
    Groups,
    MeshText,
    ScheduleText,
    ShapesText,
)
from zeroir.config.groups import SEPARATOR, GroupError, GroupSpec, parse_groups
from zeroir.config.loss_scale import LossScale
from zeroir.config.meshes import default_world_size, parse_mesh
from zeroir.config.offload import Offload
from zeroir.config.offload_places import OPTIMIZER, without_folders
from zeroir.config.optimizer import OptimizerOptions
from zeroir.config.precision import Precision
from zeroir.config.searched import Searched
from zeroir.config.steps import Evaluate, MicroSteps, Recompute
from zeroir.config.table import Option, OptionObject, text_of
from zeroir.config.units import Units
from zeroir.errors import UserError
from zeroir.ir.limits import LARGEST_SCALAR, MOST_RANKS
from zeroir.ir.mesh import DATA_AXIS, REPLICATE_AXIS, Axis, Mesh
from zeroir.ir.optimizers.catalogue import OPTIONS, Algorithm
from zeroir.ir.options import Options, Pairs

_SHARDING: Final = "Sharding"
_STEPS: Final = "Steps"
_OPTIMIZER: Final = "Optimizer"


class CompileOptions(Options, OptionObject):
    """The options of a compilation. The order of the fields is that of the groups in ``--help``."""

    command: ClassVar[str | None] = "compile"

    _as_read: Pairs | None = PrivateAttr(None)

    stage: Annotated[
        int,
        Field(ge=0, le=3),
        Option(
            group=_SHARDING,
            help="ZeRO stage: 0 shards nothing, 1 the optimizer, 2 the gradients too, 3 the parameters too.",
            searched=Searched(values=(0, 1, 2, 3), words="stage {value}"),
        ),
    ] = 3
    mesh: Annotated[
        MeshText,
        Option(
            group=_SHARDING,
            help="Hybrid sharding, such as replicate=2,shard=4: groups of 4 ranks hold all shards, and gradients are "
            "also summed over the 2 groups. [default: one group]",
            searched=Searched(words="{value}"),
        ),
    ] = None
    world_size: Annotated[
        int,
        Option(
            group=_SHARDING,
            help="Number of ranks. [default: the ranks of the mesh, else of the torchrun job, else the visible GPUs, "
            "or 2 without GPUs]",
        ),
    ] = Field(ge=1, le=MOST_RANKS, default_factory=default_world_size)
    units: Units = Units()
    precision: Precision = Precision()
    micro_steps: MicroSteps = MicroSteps()
    shapes: Annotated[
        ShapesText,
        Option(
            group=_STEPS,
            help="Sizes of the batch's tensors that differ from batch to batch, such as "
            "'input_ids: batch<=16, length<=8192; labels: batch, length'. [default: those of shapes() in the model "
            "file, or else the sizes of the example batch alone]",
        ),
    ] = None
    evaluate: Evaluate = Evaluate()
    optimizer: OptimizerOptions = OptimizerOptions()
    schedule: Annotated[
        ScheduleText,
        Option(
            group=_OPTIMIZER,
            help="Learning-rate schedule that `zeroir run` follows, such as cosine{warmup=100,total=1000} (also "
            "constant, linear, and DeepSpeed's). [default: none]",
        ),
    ] = None
    group: Annotated[
        Groups,
        Option(
            group=_OPTIMIZER,
            separator=SEPARATOR,
            help="Settings for some parameters: PATTERN:KEY=VALUE,..., such as head.*:lr=1e-4,weight_decay=0, where "
            "the pattern is of names of parameters or modules and the keys are the options of the optimizer. A "
            "parameter is in the first group that matches it.",
        ),
    ] = ()
    clip: Annotated[
        float | None,
        Field(gt=0, le=LARGEST_SCALAR),
        Option(
            group=_OPTIMIZER,
            help="Largest global L2 norm of the gradient. [default: no clipping]",
        ),
    ] = None
    ema: Annotated[
        float | None,
        Field(ge=0, lt=1),
        Option(
            group=_OPTIMIZER,
            help="Decay of an exponential moving average of the weights, such as 0.999, which is kept beside them. "
            "[default: no average]",
        ),
    ] = None
    prefetch: Prefetch = Prefetch()
    communication: Communication = Communication()
    recompute: Recompute = Recompute()
    unshard: Unshard = Unshard()
    offload: Offload = Offload()
    loss_scale: LossScale = LossScale()

    @model_validator(mode="after")
    def _mesh_fits_world_size(self) -> Self:
        if self.mesh is not None and parse_mesh(self.mesh).world_size != self.world_size:
            ranks = parse_mesh(self.mesh).world_size
            raise ValueError(
                f"--mesh {self.mesh} has {ranks} ranks, but --world-size is {self.world_size}; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_valid(self) -> Self:
        try:
            specs = parse_groups(self.group)
        except GroupError as error:
            raise ValueError(f"--group {error}") from None
        for spec in specs:
            try:
                self.optimizer.of_group(spec.settings)
            except UserError as error:
                key, _, problem = str(error).removeprefix("--").removesuffix(".").partition(" ")
                key = key.replace("-", "_")
                raise ValueError(f"--group {spec.text}: {key} {problem}") from None
        return self

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

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups of ``group``, which the parameters that match no other group are not in."""
        return parse_groups(self.group)

    @property
    def every_optimizer(self) -> tuple[OptimizerOptions, ...]:
        """The settings of all parameters: those that are in no group, and those of each group."""
        return (self.optimizer, *(self.optimizer.of_group(spec.settings) for spec in self.groups))

    @property
    def is_update_overlapped(self) -> bool:
        """Whether the update begins in the backward, which is possible if no decision waits for all gradients."""
        return self.communication.overlap_update and not self.has_decision

    @property
    def has_decision(self) -> bool:
        """Whether the update waits for a decision about all gradients: clipping, or whether to skip the step."""
        return self.clip is not None or self.precision.is_fp16

    @property
    def may_speculate(self) -> bool:
        """Whether the host's update could begin before such a decision, and nothing says whether it shall."""
        is_of_host = OPTIMIZER in self.offload.what and OPTIMIZER not in self.offload.kept_on_disk
        is_open = self.offload.speculate is None
        return is_open and is_of_host and self.optimizer.bits == 32 and self.has_decision

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.precision.is_fp16 and self.loss_scale.fixed is None

    @property
    def first_loss_scale(self) -> float:
        """The loss scale of the first step; 1 where there is none."""
        if not self.precision.is_fp16:
            return 1.0
        fixed = self.loss_scale.fixed
        return self.loss_scale.initial if fixed is None else fixed

    @classmethod
    def from_pairs(cls, pairs: Pairs, **others: object) -> Self:
        """Read what a file stores of options, which keep these texts; an option may have no effect.

        A program has the settings of every optimizer; those of other optimizers are left out. ``others`` are values
        for options that the file does not have.

        Raises:
            UserError: on the first that is wrong, as ``make_options`` does.
        """
        values = others | dict(pairs)
        optimizer = values.get("optimizer")
        if optimizer in set(Algorithm):
            for name, option in OPTIONS.items():
                if optimizer not in option.settings:
                    values.pop(name, None)
        options = cls.from_flat(values)
        options._as_read = pairs
        return options

    @property
    def pairs(self) -> Pairs:
        """The names and texts that files store: those that were read, or else of all options that are set."""
        return self.all_pairs if self._as_read is None else self._as_read

    @property
    def all_pairs(self) -> Pairs:
        """The names and texts of all options that are set, sorted by name.

        The folder of ``offload_to`` is left out: it is a matter of the machine that runs the program.
        """
        values = {**self.flat, "offload_to": without_folders(self.offload.to)}
        rows = self.rows()
        return tuple(
            (name, text_of(value, rows[name].option.separator))
            for name, value in sorted(values.items())
            if value not in (None, ())
        )
