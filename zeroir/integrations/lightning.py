"""``ZeroirStrategy``: PyTorch Lightning's ``Trainer`` with an engine of zeroir in place of DDP, FSDP or DeepSpeed.

The trainer keeps its loops, callbacks, loggers, schedules and checkpoints. ``training_step`` is compiled into the step
of a program, and ``validation_step`` into its evaluation. The values that they log are outputs of the program, which
the strategy logs each time that the program has run.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zeroir.api import CompiledProgram
from zeroir.api.compiling import compile_following
from zeroir.api.keywords import merged
from zeroir.config.field_types import STEP
from zeroir.config.steps import MicroSteps
from zeroir.errors import CheckpointWarning, ModelWarning, UserError
from zeroir.frontend.source.source import Earlier
from zeroir.integrations.defaults import most_positions_of, multiple_of, require_effect
from zeroir.integrations.fitted_programs import (
    SET_BY_SAVING,
    FittedPrograms,
    shapes_below,
)
from zeroir.integrations.lightning_steps import (
    BATCH,
    INDEX,
    StepLogs,
    Tree,
    logged_values,
    program_loss,
    returned_value,
)
from zeroir.integrations.torch_schedulers import move_scheduler, without_schedule
from zeroir.runtime.training.random_states import host_generators_kept
from zeroir.torch_ops.batches import Batch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import STEP_OUTPUT

    from zeroir.api.keywords import CompileKeywords
    from zeroir.config import FloatName
    from zeroir.runtime.engine.engine import Engine

_PRECISIONS: Final[Mapping[str, FloatName]] = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
}

_STATE: Final = ".zeroir"
"""The suffix of the folder with the engine's state, after the name of the trainer's checkpoint."""


class ZeroirStrategy(DDPStrategy):
    """A strategy of PyTorch Lightning: ``Trainer(strategy=ZeroirStrategy(stage=3))``.

    ``options`` are keywords of ``zeroir.compile``, and have precedence over those derived from the trainer's arguments:
    ``precision`` and ``clip``. ``kernels`` is that of ``CompiledProgram.engine``. At the end of ``fit`` the values are
    returned to the module, complete on the CPU of every rank, unless ``return_model`` is False. During ``fit``, they
    are in the engine: use ``gathered`` to read them.

    Raises:
        UserError: by ``fit``, if a compiled step does not support the trainer or the module.
    """

    strategy_name = "zeroir"

    def __init__(
        self,
        *,
        kernels: str = "eager",
        return_model: bool = True,
        **options: Unpack[CompileKeywords],
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._returns_model = return_model
        self._options = options
        self._engine: Engine | None = None
        self._programs: FittedPrograms | None = None
        self._logs: list[tuple[CompiledProgram, StepLogs]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._users_optimizer: torch.optim.Optimizer | None = None
        self._read_path = ""
        self._resumed_path = ""

    @property
    def engine(self) -> Engine:
        """The engine, from the first batch of ``fit`` to its end.

        Raises:
            UserError: if there is none.
        """
        if self._engine is None:
            raise UserError("The strategy has an engine from the first batch of fit to its end.")
        return self._engine

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yield the module with all its current values, for reading; see ``Engine.gathered``.

        Collective over all ranks.

        Without an engine this is the module itself.
        """
        if self._engine is None:
            yield self._module
            return
        with self._engine.gathered(masters=True) as module:
            yield module

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        return module

    # ------------------------------------------------------------------------------------------------------- opening

    def setup(self, trainer: Trainer) -> None:
        """Make the optimizer. The first batch creates the engine; until then the module stays where it is."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        _require_supported(trainer, self._module, self._options, self.world_size)
        if self._layer_sync is not None:
            raise UserError(
                "Programs have the statistics of each rank alone: leave sync_batchnorm out."
            )
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._resumed_path = ""
        self._modes = [(part, part.training) for part in self._module.modules()]
        self.setup_optimizers(trainer)
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers):
            raise UserError(
                "configure_optimizers returns no optimizer of torch.optim: let it return one, alone or with a "
                "scheduler."
            )

    def _open(self, tree: Tree) -> None:
        """Make the engine for batches like this one. Collective over all ranks."""
        (optimizer,) = self.optimizers
        self._users_optimizer = without_schedule(optimizer)
        loader = self._module.trainer.train_dataloader
        programs = self._programs = FittedPrograms(
            self._program,
            tree,
            given=shapes_below(BATCH, self._options.get("shapes"), tree[BATCH]),
            multiple=multiple_of(getattr(loader, "collate_fn", None)),
            most_positions=most_positions_of(self._module),
        )
        engine = self._engine = programs.present.compiled.engine(
            compile_again=False,
            ignore=SET_BY_SAVING,
            kernels=self._kernels,
            seed=torch.initial_seed(),
        )
        programs.drive(engine)
        for part in self._module.modules():
            if isinstance(part, LightningModule):
                part._device = self.root_device  # Values that it logs go there.
        for config in self.lr_scheduler_configs:
            move_scheduler(config.scheduler, optimizer, engine.optimizer)
        self.optimizers = [engine.optimizer]
        if self._resumed_path:
            engine.load(self._resumed_path)

    def _program(self, example: Batch, shapes: str | None, earlier: Earlier) -> CompiledProgram:
        """Compile a program, and remember what its steps log."""
        trainer = self._module.trainer
        options: CompileKeywords = {
            "world_size": self.world_size,
            "precision": _PRECISIONS[trainer.precision],
            "micro_steps": trainer.accumulate_grad_batches,
            "clip": trainer.gradient_clip_val or None,
        }
        options = merged(options, self._options)
        assert self._users_optimizer is not None
        options["optimizer"] = self._users_optimizer
        options["shapes"] = shapes
        logs = StepLogs()
        present = [(part, part.training) for part, _ in self._modes]
        _set_modes(self._modes)
        try:
            with (
                host_generators_kept(),
                _evaluation_required(is_required=trainer.enable_validation),
            ):
                program = compile_following(
                    earlier, self._module, example, loss=program_loss(logs), **options
                )
        finally:
            _set_modes(present)
        self._logs.append((program, logs))
        return program

    @property
    def _present_logs(self) -> StepLogs:
        """What the steps of the present program log."""
        assert self._programs is not None
        present = self._programs.present.compiled
        return next(logs for program, logs in self._logs if program is present)

    # ------------------------------------------------------------------------------------------------------ training

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Make the engine before the loop uses the optimizer for the first step."""
        if self._engine is None:
            self._open(_tree(batch, batch_idx))

    def training_step(self, batch: object, batch_idx: int = 0) -> Tensor:
        """Run a micro-step, log its loss as the module does, and return it."""
        is_last = not self._module.trainer.fit_loop._should_accumulate()
        result = self.engine.micro_step(_tree(batch, batch_idx), is_last=is_last)
        loss = torch.tensor(result.loss, device=self.root_device)
        for log in self._present_logs.training:
            log.repeat(self._module, loss)
        return loss

    def backward(
        self, closure_loss: Tensor, optimizer: object, *_args: object, **_options: object
    ) -> Tensor:
        """Call the hooks around the backward, which is a part of ``training_step``."""
        del optimizer
        plugin, module = self.precision_plugin, self._module
        PrecisionPlugin.pre_backward(plugin, closure_loss, module)
        return PrecisionPlugin.post_backward(plugin, closure_loss, module)

    def optimizer_step(
        self,
        optimizer: object,
        closure: Callable[[], object],
        model: object = None,
        **_options: object,
    ) -> object:
        """Run the last micro-step by calling ``closure``, and update; the program clips."""
        del model
        output = closure()
        trainer = self._module.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        self.engine.update()
        return output

    def validation_step(self, batch: object, batch_idx: int = 0, *others: object) -> STEP_OUTPUT:
        """Evaluate a batch, log what the module logs, and return its result; outside ``fit``, call the module."""
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            return super().validation_step(batch, batch_idx, *others)
        if others:
            raise UserError(
                "ZeroirStrategy evaluates one data loader: give fit one, and the others to trainer.validate."
            )
        if self._engine is None:
            self._open(_tree(batch, batch_idx))
        outputs = self.engine.evaluate(_tree(batch, batch_idx)).outputs
        logs = self._present_logs.validation
        for log, value in zip(logs, logged_values(outputs), strict=True):
            log.repeat(self._module, value)
        return cast("STEP_OUTPUT", returned_value(outputs))

    def on_train_end(self) -> None:
        """Return the values to the module."""
        if self._engine is not None and self._returns_model:
            self._engine.return_values(self._module)
        self._close()

    def teardown(self) -> None:
        """Close the engine after an error; the module has lost its values then."""
        self._close()
        if any(parameter.is_meta for parameter in self._module.parameters()):
            self._lightning_module = None  # Lightning would move it to the CPU.
        super().teardown()

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        self._programs, self._logs = None, []
        if engine is not None:
            engine.close()

    # --------------------------------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the module in its own dtypes; during ``fit``, only on rank 0."""
        if self._engine is None:
            return super().lightning_module_state_dict()
        dtypes = {
            name: tensor.dtype for name, tensor in self._module.state_dict(keep_vars=True).items()
        }
        values = self._engine.state_dict(rank0_only=True)
        return {name: value.to(dtypes.get(name)) for name, value in values.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Save the trainer's checkpoint, and the state of an engine next to it, of which each rank writes its part."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        # The state of an earlier checkpoint with this name would be mistaken for this one's.
        self._remove_state(filepath)
        if self._engine is not None and "optimizer_states" in checkpoint:
            self._engine.save(_state_path(filepath))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint of the trainer and of the engine."""
        super().remove_checkpoint(filepath)
        self._remove_state(filepath)

    def _remove_state(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            shutil.rmtree(_state_path(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the trainer's checkpoint."""
        self._read_path = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Make the engine load its state once it exists; without a saved one, the optimizer starts anew."""
        del checkpoint
        state = _state_path(os.path.realpath(self._read_path))
        if Path(state).is_dir():
            self._resumed_path = state
            return
        warnings.warn(
            f"'{self._read_path}' has no state of ZeroirStrategy beside it: the weights go on, and the optimizer "
            "begins anew.",
            CheckpointWarning,
            stacklevel=2,
        )


def _tree(batch: object, index: int) -> Tree:
    return {BATCH: batch, INDEX: torch.tensor(index)}


def _state_path(checkpoint: str | Path) -> str:
    return f"{os.fspath(checkpoint)}{_STATE}"


@contextmanager
def _evaluation_required(*, is_required: bool) -> Iterator[None]:
    """Raise the warning that a program cannot evaluate as a UserError if the trainer will validate."""
    with warnings.catch_warnings():
        if is_required:
            warnings.filterwarnings("error", "The program cannot evaluate", ModelWarning)
        try:
            yield
        except ModelWarning as warning:
            raise UserError(str(warning)) from warning


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, is_training in modes:
        part.training = is_training


def _require_supported(
    trainer: Trainer, module: LightningModule, options: CompileKeywords, world_size: int
) -> None:
    """Raise a UserError if a compiled step does not support the trainer or the module."""
    if not module.automatic_optimization:
        raise UserError(
            "ZeroirStrategy compiles the whole step, so the module cannot drive it by manual optimization: use "
            "zeroir.compile and a loop of your own."
        )
    for hook in ("backward", "configure_gradient_clipping"):
        if is_overridden(hook, module):
            raise UserError(
                f"The module defines {hook}, but the backward and the clipping are a part of the compiled step: leave "
                f"{hook} out, and pass gradient_clip_val to the Trainer."
            )
    if trainer.gradient_clip_algorithm not in (None, GradClipAlgorithmType.NORM):
        raise UserError(
            "Programs clip the norm of the gradient, and no single values: leave gradient_clip_algorithm out."
        )
    if trainer._detect_anomaly:
        raise UserError(
            "A compiled step has no autograd graph in which detect_anomaly could look: leave detect_anomaly out."
        )
    if trainer.precision not in _PRECISIONS:
        raise UserError(
            f"precision is {trainer.precision}, but should be one of {', '.join(_PRECISIONS)} for ZeroirStrategy."
        )
    require_effect(
        options,
        "ZeroirStrategy",
        instead={
            "optimizer": "name the optimizer in configure_optimizers of the module",
            "schedule": "let configure_optimizers of the module return a scheduler",
            "outputs": "what validation_step returns and logs is what an evaluation yields",
        },
        decided={
            "world_size": (world_size, "the devices and nodes of the Trainer are its ranks"),
            "micro_steps": (
                trainer.accumulate_grad_batches,
                "accumulate_grad_batches of the Trainer is the number of batches of a step",
            ),
        },
    )
    micro_steps = options.get("micro_steps")
    if isinstance(micro_steps, MicroSteps) and micro_steps.order != STEP:
        raise UserError(
            "Lightning's loop takes micro-batches one by one, and logs the loss of each: leave the order out "
            "of micro_steps=."
        )
