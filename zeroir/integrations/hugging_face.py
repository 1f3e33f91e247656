"""``ZeroirTrainer``: Hugging Face's ``Trainer`` with an engine of zeroir in place of DDP, FSDP or DeepSpeed.

The trainer keeps its loop, callbacks, logs, schedules, metrics and checkpoint folders. The engine replaces its wrapped
model, gradients and optimizer; the trainer's loss is compiled into the program.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.trainer import Trainer
from transformers.trainer_pt_utils import nested_concat

from zeroir.api.keywords import merged
from zeroir.errors import CheckpointWarning, UserError
from zeroir.integrations.defaults import (
    first_batch,
    most_positions_of,
    multiple_of,
    require_effect,
)
from zeroir.integrations.engine_of_trainer import EngineOfTrainer, Inputs, TrainerBatch
from zeroir.integrations.torch_schedulers import move_scheduler, without_schedule
from zeroir.integrations.training_arguments import options_of_arguments, require_supported
from zeroir.report.names import counted
from zeroir.torch_ops.batches import with_tensors

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers.trainer_utils import TrainOutput
    from transformers.training_args import TrainingArguments

    from zeroir.api.keywords import CompileKeywords
    from zeroir.runtime.engine.accumulation import MicroStepResult

_STATE: Final = "zeroir"
"""The folder of the engine's state in a checkpoint of the trainer."""

_SCHEDULER: Final = "scheduler.pt"
_NO_OUTPUTS: Final = ("loss", "past_key_values")

_joined: Final = cast("Callable[[object, object], object]", nested_concat)
"""Concatenates two predictions of the same structure, padded to the same length."""


class ZeroirTrainer(Trainer):
    """Hugging Face's ``Trainer`` with an engine; under torchrun, or on a single rank.

    ``zeroir_options`` are keywords of ``zeroir.compile``, such as ``stage`` (default 3) or ``offload``, and have
    precedence over those derived from ``args``: ``precision`` and ``clip``. At the end of ``train`` the values are
    returned to the model, complete on the CPU of every rank, unless ``return_model`` is False. ``others`` are other
    arguments of ``Trainer``, by name.

    During training, the values of the model are in the engine: use ``gathered`` to read them.

    Raises:
        UserError: if ``args`` request another way to distribute the training, or an argument or option would have no
            effect.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        zeroir_options: CompileKeywords | None = None,
        return_model: bool = True,
        **others: object,
    ) -> None:
        if args is not None:
            require_supported(args)
        self._options: CompileKeywords = {} if zeroir_options is None else zeroir_options
        if not isinstance(zeroir_options, dict | None):
            raise UserError(
                f"zeroir_options is {zeroir_options!r}, but should be a dict of keywords of zeroir.compile."
            )
        self._returns_model = return_model
        self._running: EngineOfTrainer | None = None
        self._unreported: list[MicroStepResult] = []
        super().__init__(cast("Any", model), args, **cast("dict[str, Any]", others))
        require_effect(
            self._options,
            "zeroir_options",
            instead={
                "optimizer": "name the optimizer in TrainingArguments or in optimizers= of the trainer",
                "schedule": "name it in TrainingArguments or in optimizers= of the trainer",
                "mean_over": "the trainer counts labels itself",
                "outputs": "the outputs of the model are what an evaluation yields",
            },
            decided={
                "world_size": (self.args.world_size, "the ranks are those of the job"),
                "micro_steps": (
                    self.args.gradient_accumulation_steps,
                    "gradient_accumulation_steps of TrainingArguments is the number of batches of a step",
                ),
            },
        )

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yield the model with all its current values, for reading; see ``Engine.gathered``. Collective over all ranks.

        Before the first training this is the model itself.
        """
        if self._running is None:
            yield cast("nn.Module", self.model)
            return
        with self._running.engine.gathered(masters=True) as module:
            yield module

    # ------------------------------------------------------------------------------------------------------ training

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, Any]:
        """Leave precision to the program; otherwise accelerate would scale losses and cast outputs."""
        arguments = super()._build_accelerator_args(**kwargs)
        return {**arguments, "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank's device gets only its shards."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[object] | None = None
    ) -> nn.Module:
        if self._running is not None:
            return self._running.wrapped
        return super()._wrap_model(model, training, dataloader)

    def _prepare_for_training(
        self,
        max_steps: int,
        train_dataloader: DataLoader[object],
        resume_from_checkpoint: str | None,
    ) -> tuple[nn.Module, DataLoader[object]]:
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        running = self._running
        if running is None or running.model is not self.model:
            running = self._open(train_dataloader)
        else:
            running.take_changes()
        engine = running.engine
        self._require_whole_groups(engine.program.interleaved, train_dataloader, max_steps)
        move_scheduler(self.lr_scheduler, self.optimizer, engine.optimizer)
        self.optimizer = engine.optimizer
        self.accelerator._optimizers.append(_SkippedSteps(running=running))
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = running.wrapped
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for attribute in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, attribute, getattr(self, attribute))
        self.callback_handler.train_dataloader = train_dataloader
        return running.wrapped, train_dataloader

    def _require_whole_groups(
        self, group: int, train_dataloader: DataLoader[object], max_steps: int
    ) -> None:
        """Refuse data whose epochs end with an incomplete group of micro-batches, which run layer by layer."""
        if group == 1 or isinstance(train_dataloader.dataset, torch.utils.data.IterableDataset):
            return
        whole_steps, rest = divmod(len(train_dataloader), self.args.gradient_accumulation_steps)
        if rest % group and max_steps > whole_steps:
            raise UserError(
                f"The last step of an epoch has {counted(rest, 'batch', 'batches')}, but the program runs them in "
                f"groups of {group}: leave the order out of micro_steps= in zeroir_options, or train on data that "
                "fill the groups."
            )

    def _open(self, train_dataloader: DataLoader[object]) -> EngineOfTrainer:
        """Compile a program for the data's first samples, and make an engine with the model's values."""
        if self._running is not None:
            self._running.engine.close()
            self._running = None
        args, model = self.args, cast("nn.Module", self.model)
        optimizer = self.create_optimizer()
        example = self._prepare_inputs(
            cast("dict[str, Any]", first_batch(train_dataloader, self._train_batch_size))
        )
        num_items = self._get_num_items_in_batch([example], args.device)
        needs_outputs = self.compute_metrics is not None and not args.prediction_loss_only
        self._running = EngineOfTrainer(
            model,
            # What it reads counts, and so does what a function of the user's reads.
            partial(self._program_loss, self.compute_loss_func),
            TrainerBatch(
                inputs=with_tensors(example, lambda tensor: tensor.cpu()),
                num_items=_number(num_items),
            ),
            optimizer=without_schedule(optimizer),
            options=self._compile_options(model),
            has_outputs=needs_outputs,
            multiple=multiple_of(self.data_collator),
            most_positions=most_positions_of(model),
            seed=args.seed,
            timeout=args.ddp_timeout_delta,
            kernels="inductor" if args.torch_compile else "eager",
        )
        return self._running

    def _compile_options(self, model: nn.Module) -> CompileKeywords:
        return merged(options_of_arguments(self.args, model), self._options)

    def _program_loss(
        self,
        users_function: object,
        module: nn.Module,
        inputs: dict[str, object],
        num_items: Tensor | None,
        micro_steps: Tensor,
    ) -> tuple[Tensor, object]:
        """Return the loss of a micro-batch, whose mean over micro-steps and ranks the program differentiates."""
        result = self.compute_loss(
            module, inputs, return_outputs=True, num_items_in_batch=num_items
        )
        loss, outputs = result
        has_items = num_items is not None
        if self._is_sum_over_micro_steps(users_function, has_items=has_items):
            loss = loss * micro_steps
        return loss, self._predictions(outputs)

    def _is_sum_over_micro_steps(self, users_function: object, *, has_items: bool) -> bool:
        """Return whether the loss of a step is the sum over its micro-batches instead of their mean.

        See ``compute_loss``.
        """
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return (self.model_accepts_loss_kwargs and has_items) or users_function is not None

    def _predictions(self, outputs: object) -> object:
        """Return the outputs that the trainer uses as predictions in an evaluation."""
        if not isinstance(outputs, Mapping):
            return outputs[1:] if isinstance(outputs, tuple) else outputs
        config = getattr(self.model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", ()) if config is not None else ()
        return {
            name: value
            for name, value in outputs.items()
            if name not in (*_NO_OUTPUTS, *ignored) and value is not None
        }

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Run a micro-step, and return its part of the step's loss."""
        model.train()  # Its values are in the engine; an evaluation before may have changed its mode.
        assert self._running is not None
        micro_steps = self.current_gradient_accumulation_steps
        batch = TrainerBatch(
            inputs=self._prepare_inputs(inputs),
            num_items=_number(num_items_in_batch),
            micro_steps=micro_steps,
        )
        self._unreported.append(
            self._running.micro_step(batch, is_last=self.accelerator.sync_gradients)
        )
        loss = 0.0
        if self._unreported[-1].is_known:  # A group of micro-steps runs with the last of them.
            loss = sum(result.loss for result in self._unreported) / micro_steps
            self._unreported.clear()
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing, since the program clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """Do nothing, since the norm is a result of the following update."""

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        model: nn.Module,
        trial: object,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        if self._running is not None and self._running.engine.last_result is not None:
            grad_norm = self._running.engine.last_result.grad_norm
        super()._maybe_log_save_evaluate(
            tr_loss,
            grad_norm,
            model,
            cast("Any", trial),
            epoch,
            ignore_keys_for_eval,
            start_time,
            learning_rate=learning_rate,
        )

    def _finalize_training(
        self, trial: object, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        finalize: Callable[..., TrainOutput] = super()._finalize_training
        output = finalize(trial, num_train_samples, start_time)
        if self._running is not None and self._returns_model:
            self._running.return_values()
        return output

    # ---------------------------------------------------------------------------------------------------- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Evaluate a batch with the engine, if there is one; see ``Trainer.prediction_step``.

        A batch without labels has no loss: the model is gathered for it, and computes the predictions itself.
        """
        if self._running is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._running.take_changes()
        if any(inputs.get(name) is None for name in self.label_names) or not self.label_names:
            with self.gathered() as whole:
                whole.eval()
                return super().prediction_step(whole, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        loss, outputs = self._evaluated(inputs, needs_outputs=not prediction_loss_only)
        if prediction_loss_only:
            return loss, None, None
        if isinstance(outputs, Mapping):
            names = [name for name in outputs if name not in (ignore_keys or ())]
            outputs = tuple(outputs[name] for name in names)
        if isinstance(outputs, tuple | list) and len(outputs) == 1:
            outputs = outputs[0]
        labels = tuple(inputs[name] for name in self.label_names)
        return loss, cast("Tensor", outputs), labels[0] if len(labels) == 1 else cast("Any", labels)

    def _evaluated(self, inputs: Inputs, *, needs_outputs: bool) -> tuple[Tensor, object]:
        """Return the loss of a batch with any number of rows, and the outputs of the model.

        It is evaluated in pieces with at most as many rows as the batches for training.
        """
        assert self._running is not None
        running = self._running
        rows, per_piece = _rows(inputs), running.most_rows
        most_rows = max(int(number) for (number,) in running.engine.job.exchange([rows]))
        loss, total = 0.0, 0
        outputs: object = None
        for start in range(0, most_rows, per_piece):
            # A rank without further rows repeats its last one.
            piece = _rows_of(inputs, min(start, rows - 1), start + per_piece)
            num_items = _number(self._get_num_items_in_batch([piece], self.args.device))
            evaluation = running.evaluate(
                TrainerBatch(inputs=piece, num_items=num_items), needs_outputs=needs_outputs
            )
            if start >= rows:
                continue
            weight = _rows(piece) if num_items is None else num_items
            loss, total = loss + weight * evaluation.loss, total + weight
            if needs_outputs:
                new = evaluation.outputs
                outputs = new if outputs is None else _joined(outputs, new)
        return torch.tensor(loss / total if total else loss, device=self.args.device), outputs

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for ``from_pretrained``, in the dtypes in which it was loaded.

        During training this is collective over all ranks, because rank 0 gathers the values.
        """
        running = self._running
        if running is None or running.is_returned:
            super().save_model(output_dir, _internal_call)
            return
        values = running.engine.state_dict(
            rank0_only=not self.args.save_on_each_node,
            # An adapter is saved without its base model, which may not fit on any host.
            only_trained=hasattr(running.model, "peft_config"),
        )
        # The model's tensors have no values that could be detached.
        own = running.model.state_dict(keep_vars=True)
        dtypes = {name: tensor.dtype for name, tensor in own.items()}
        self._save(
            output_dir,
            state_dict={name: value.to(dtypes.get(name)) for name, value in values.items()},
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state to resume training: the engine's, of which every rank writes its part."""
        assert self._running is not None
        state = Path(output_dir, _STATE)
        if self.args.should_save and state.is_dir():
            # The trainer also replaces the model's files of an earlier run in this folder.
            shutil.rmtree(state)
        self._running.engine.save(state)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the model of another trainer's checkpoint; those of this one are loaded with the engine's state."""
        if not Path(resume_from_checkpoint, _STATE).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._running is not None
        state, scheduler = Path(checkpoint, _STATE), Path(checkpoint, _SCHEDULER)
        if state.is_dir():
            self._running.engine.load(state)
        else:
            warnings.warn(
                f"'{checkpoint}' has no state of ZeroirTrainer: the weights go on, and the optimizer begins anew.",
                CheckpointWarning,
                stacklevel=2,
            )
        if scheduler.is_file() and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        assert self._running is not None
        best = self.state.best_model_checkpoint
        assert best is not None
        self._running.engine.load(Path(best, _STATE), weights_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SkippedSteps:
    """Reports to accelerate, and so to the trainer's schedule, that an update was skipped because of an overflow."""

    running: EngineOfTrainer

    @property
    def step_was_skipped(self) -> bool:
        result = self.running.engine.last_result
        return result is not None and result.is_skipped


def _number(num_items: Tensor | int | None) -> int | None:
    return None if num_items is None else round(float(num_items))


def _rows(inputs: Inputs) -> int:
    """Return the number of rows of a batch.

    Raises:
        UserError: if it has none.
    """
    tensors = (value for value in inputs.values() if isinstance(value, Tensor) and value.ndim)
    rows = next((tensor.shape[0] for tensor in tensors), 0)
    if not rows:
        raise UserError("The batch has no rows: give tensors whose first dimension is the batch.")
    return rows


def _rows_of(inputs: Inputs, start: int, stop: int) -> dict[str, object]:
    """Return the rows from ``start`` to ``stop``."""
    return {
        name: value[start:stop] if isinstance(value, Tensor) and value.ndim else value
        for name, value in inputs.items()
    }
