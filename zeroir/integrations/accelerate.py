"""``prepare``: run a training loop of accelerate with an engine in place of the wrapped model.

The loop keeps its ``Accelerator``, which still distributes the data, decides when gradients accumulate, gathers
metrics, logs, and saves and loads the states of schedules, data and random generators. The engine replaces
``backward``, ``clip_grad_norm_`` and the optimizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Unpack, overload

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, DynamoBackend

from zeroir.api.compiling import compile_following
from zeroir.api.keywords import merged
from zeroir.errors import UserError
from zeroir.frontend.source.given_shapes import given_shapes
from zeroir.integrations.defaults import (
    first_batch,
    most_positions_of,
    multiple_of,
    precision_of,
    require_effect,
)
from zeroir.integrations.fitted_programs import SET_BY_SAVING, FittedPrograms
from zeroir.integrations.torch_schedulers import move_scheduler, without_schedule
from zeroir.torch_ops.batches import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from zeroir.api import CompiledProgram
    from zeroir.api.keywords import CompileKeywords
    from zeroir.config import FloatName
    from zeroir.frontend.source.source import Earlier, LossFunction
    from zeroir.runtime.engine.engine import Engine

_STATE: Final = "zeroir"
"""The folder of the engine's state in a state that ``Accelerator.save_state`` saves."""

_PRECISIONS: Final[Mapping[str, FloatName]] = {"bf16": "bf16", "fp16": "fp16"}

_REPLACED: Final[Mapping[str, str]] = {
    "backward": "call engine.micro_step(batch) in its place, which computes the loss, too",
    "clip_grad_norm_": "pass clip= to zeroir.prepare, and read grad_norm of engine.last_result",
    "clip_grad_value_": "programs clip the norm of the gradient alone; pass clip= to zeroir.prepare",
}
"""Replacements for methods of ``Accelerator`` that would have no effect, or a wrong one, with an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOptimizer:
    """An engine's optimizer that updates when gradients have accumulated, like accelerate's."""

    engine: Engine
    accelerator: Accelerator

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings of the engine's optimizer groups; changes take effect at the next update."""
        return self.engine.optimizer.param_groups

    def step(self) -> None:
        """Update after the last micro-step of a step, and do nothing after others."""
        if self.accelerator.sync_gradients:
            self.engine.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, since every step begins with new gradients."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped because of an overflow, so that the schedule waits."""
        result = self.engine.last_result
        return result is not None and result.is_skipped


@overload
def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    scheduler: None = None,
    /,
    *,
    loss: LossFunction | None = None,
    batch: Batch = None,
    kernels: str = "eager",
    **options: Unpack[CompileKeywords],
) -> tuple[Engine, PreparedOptimizer, DataLoader[Any]]: ...


@overload
def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    scheduler: LRScheduler,
    /,
    *,
    loss: LossFunction | None = None,
    batch: Batch = None,
    kernels: str = "eager",
    **options: Unpack[CompileKeywords],
) -> tuple[Engine, PreparedOptimizer, DataLoader[Any], AcceleratedScheduler]: ...


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    scheduler: LRScheduler | None = None,
    /,
    *,
    loss: LossFunction | None = None,
    batch: Batch = None,
    kernels: str = "eager",
    **options: Unpack[CompileKeywords],
) -> tuple[object, ...]:
    """Make an engine, and prepare the optimizer, data loader and scheduler, in place of ``accelerator.prepare``.

    The loop then calls ``engine.micro_step(batch, is_last=accelerator.sync_gradients)``, ``optimizer.step()`` and
    ``scheduler.step()``. ``loss``, ``kernels`` and ``options`` are those of ``zeroir.compile`` and
    ``CompiledProgram.engine``; ``precision`` and ``micro_steps`` default to the accelerator's. ``batch`` is an example
    batch of one rank, by default of the first samples of ``loader``. From now on, ``save_state`` and ``load_state`` of
    the accelerator include the engine's state. Collective over all ranks.

    Raises:
        UserError: if the accelerator distributes the model itself or requires another precision, if the loader has no
            batch size and ``batch`` is missing, or in the cases of ``zeroir.compile``.
    """
    _require_supported(accelerator)
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise UserError(
            f"The fourth argument of zeroir.prepare is a {type(loader).__name__}, but should be a DataLoader."
        )
    require_effect(
        options,
        "zeroir.prepare",
        instead={
            "optimizer": "name the optimizer in the third argument",
            "schedule": "pass a scheduler of torch.optim.lr_scheduler as the fifth argument",
        },
        decided={
            "world_size": (accelerator.num_processes, "the ranks are those of the Accelerator")
        },
    )
    if batch is None:
        batch = first_batch(loader, _rows(accelerator, loader))
    given: CompileKeywords = {
        "world_size": accelerator.num_processes,
        "precision": _PRECISIONS.get(accelerator.mixed_precision) or precision_of(model),
        "micro_steps": accelerator.gradient_accumulation_steps,
    }
    given = merged(given, options)
    given["optimizer"] = without_schedule(optimizer)
    group = accelerator.init_handler
    timeout = None if group is None else group.timeout
    shapes = given.pop("shapes", None)

    def compile_program(example: Batch, text: str | None, earlier: Earlier) -> CompiledProgram:
        options: CompileKeywords = {**given, "shapes": text}
        return compile_following(earlier, model, example, loss=loss, **options)

    programs = FittedPrograms(
        compile_program,
        batch,
        given=None if shapes is None else given_shapes(shapes, batch),
        multiple=multiple_of(loader.collate_fn),
        most_positions=most_positions_of(model),
        timeout=timeout,
    )
    engine = programs.present.compiled.engine(
        compile_again=False,
        ignore=SET_BY_SAVING,
        kernels=kernels,
        seed=torch.initial_seed(),
        timeout=timeout,
    )
    programs.drive(engine)
    _include_state(accelerator, engine)
    for name, remedy in _REPLACED.items():
        setattr(accelerator, name, _refusal(name, remedy))
    steps = PreparedOptimizer(engine=engine, accelerator=accelerator)
    prepared = engine, steps, accelerator.prepare_data_loader(loader)
    if scheduler is None:
        return prepared
    move_scheduler(scheduler, optimizer, engine.optimizer)
    accelerator.register_for_checkpointing(scheduler)
    accelerated = AcceleratedScheduler(
        scheduler,
        steps,
        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
        split_batches=accelerator.split_batches,
    )
    return *prepared, accelerated


def _require_supported(accelerator: Accelerator) -> None:
    if "backward" in vars(accelerator):
        raise UserError(
            "This Accelerator has an engine of zeroir.prepare already, and its saved states hold one: make another "
            "Accelerator."
        )
    distributed = accelerator.distributed_type
    if distributed in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
        DistributedType.MEGATRON_LM,
    ):
        raise UserError(
            f"The Accelerator is set up for {distributed.value}, which distributes the model itself: leave its plugin "
            "out, and pass the ZeRO stage and the offloading to zeroir.prepare."
        )
    for name, value in _ignored(accelerator).items():
        if value is not None:
            raise UserError(
                f"The Accelerator has a {type(value).__name__} ({name}), which has no effect on an engine: leave it "
                "out, and see the keywords of zeroir.prepare."
            )
    if accelerator.mixed_precision not in ("no", *_PRECISIONS):
        raise UserError(
            f"mixed_precision of the Accelerator is {accelerator.mixed_precision}, but should be no, bf16 or fp16."
        )


def _ignored(accelerator: Accelerator) -> Mapping[str, object]:
    """Return the settings of an Accelerator that an engine would ignore, None where unset."""
    handlers = ("autocast_handler", "ddp_handler", "scaler_handler")
    dynamo = accelerator.state.dynamo_plugin
    return {
        **{f"kwargs_handlers, {name}": getattr(accelerator, name, None) for name in handlers},
        "dynamo_backend": None if dynamo.backend == DynamoBackend.NO else dynamo,
        "parallelism_config": accelerator.parallelism_config,
    }


def _rows(accelerator: Accelerator, loader: DataLoader[Any]) -> int:
    """Return the number of rows of one rank's batch."""
    rows = loader.batch_size
    if rows is None:
        raise UserError(
            "The data loader has no batch_size, so zeroir.prepare does not know the shape of a batch: pass an example "
            "batch of one rank as batch=."
        )
    return rows // accelerator.num_processes if accelerator.split_batches else rows


def _include_state(accelerator: Accelerator, engine: Engine) -> None:
    """Make the accelerator save and load the engine's state, of which each rank writes its part."""

    def save(_models: object, _weights: object, folder: str | os.PathLike[str]) -> None:
        state = Path(folder, _STATE)
        if accelerator.is_main_process:
            # The accelerator also replaces the files of an earlier state in this folder.
            shutil.rmtree(state, ignore_errors=True)
        engine.save(state)

    def load(_models: object, folder: str | os.PathLike[str]) -> None:
        engine.load(Path(folder, _STATE))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _refusal(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UserError(
            f"An engine computes the gradients, so accelerator.{name} cannot: {remedy}."
        )

    return refuse
