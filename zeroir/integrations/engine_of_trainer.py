"""The engine of Hugging Face's trainer, and the programs that it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from zeroir.api import CompiledProgram
from zeroir.api.compiling import compile_following
from zeroir.config.steps import MicroSteps
from zeroir.errors import UserError
from zeroir.frontend.source.source import Earlier
from zeroir.integrations.fitted_programs import (
    SET_BY_SAVING,
    FittedPrograms,
    shapes_below,
)
from zeroir.runtime.state.named_tensors import NamedTensors
from zeroir.torch_ops.batches import Batch

if TYPE_CHECKING:
    from zeroir.api.keywords import CompileKeywords
    from zeroir.runtime.engine.accumulation import MicroStepResult
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.results import Evaluation

_INPUTS = "inputs"
_NUM_ITEMS = "num_items"
_MICRO_STEPS = "micro_steps"

_CANNOT_COMPUTE = (
    "While ZeroirTrainer trains, the values of the model are in its engine, so the model cannot be called: compute "
    "with the model that `with trainer.gathered() as model:` lends."
)

Inputs = Mapping[str, object]
"""A batch by the names of forward's arguments."""

TrainerLoss = Callable[[nn.Module, dict[str, object], Tensor | None, Tensor], tuple[Tensor, object]]
"""Computes the loss and the outputs, which are dicts, lists and tuples of tensors, from the module, its inputs, the
number of items in the step's batches, and the number of its micro-steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBatch:
    """A micro-batch: the arguments of forward, and two numbers of its step that the loss may depend on.

    ``num_items`` is the number of labels in all batches of the step, or None if the trainer does not count them.
    """

    inputs: Inputs
    num_items: int | None
    micro_steps: int = 1

    def tree(self) -> dict[str, object]:
        """Return the batch in the form of programs. Integers keep their values for any precision of the program."""
        tree: dict[str, object] = {
            _INPUTS: dict(self.inputs),
            _MICRO_STEPS: torch.tensor(self.micro_steps),
        }
        if self.num_items is not None:
            tree[_NUM_ITEMS] = torch.tensor(self.num_items)
        return tree


class WrappedModel(nn.Module):
    """A trainer's wrapped model: it has the parameters of the model, but the engine computes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *_: object, **__: object) -> NoReturn:
        """Refuse to compute.

        Raises:
            UserError: always.
        """
        raise UserError(_CANNOT_COMPUTE)


class EngineOfTrainer:
    """One engine, and the programs of a model that it runs.

    ``loss`` is compiled into the programs. ``optimizer`` is a torch optimizer over the model's parameters. The other
    arguments are those of ``zeroir.compile`` and ``CompiledProgram.engine``. Lengths of batches are multiples of
    ``multiple``, and ``most_positions`` is the model's maximum length, if it has one. Each method is collective over
    all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: TrainerLoss,
        example: TrainerBatch,
        *,
        optimizer: torch.optim.Optimizer,
        options: CompileKeywords,
        has_outputs: bool,
        multiple: int,
        most_positions: int | None,
        seed: int,
        timeout: timedelta,
        kernels: str,
    ) -> None:
        self.model = model
        self.wrapped = WrappedModel(model)
        self._loss = loss
        self._optimizer = optimizer
        self._options = options
        self._returned: list[tuple[Tensor, int]] | None = None
        self._has_outputs = has_outputs
        self._programs = FittedPrograms(
            self._compiled,
            example.tree(),
            given=shapes_below(_INPUTS, options.get("shapes"), example.inputs),
            multiple=multiple,
            most_positions=most_positions,
            timeout=timeout,
        )
        self.engine: Engine = self._programs.present.compiled.engine(
            compile_again=False, ignore=SET_BY_SAVING, seed=seed, kernels=kernels, timeout=timeout
        )
        self._programs.drive(self.engine)

    @property
    def most_rows(self) -> int:
        """The most rows of a batch for training."""
        return self._programs.most_rows

    def micro_step(self, batch: TrainerBatch, *, is_last: bool) -> MicroStepResult:
        """Run a micro-step."""
        self._returned = None
        return self.engine.micro_step(batch.tree(), is_last=is_last)

    def evaluate(self, batch: TrainerBatch, *, needs_outputs: bool) -> Evaluation:
        """Evaluate a batch."""
        if needs_outputs and not self._has_outputs:
            self._has_outputs = True
            self._programs.compile_again(self.engine)
        return self.engine.evaluate(batch.tree())

    def return_values(self) -> None:
        """Return the model's values to it, on the CPU; ``take_changes`` detects later changes."""
        self.engine.return_values(self.model)
        self._returned = self._versions()

    @property
    def is_returned(self) -> bool:
        """Whether the model has the engine's values, or later ones."""
        return self._returned is not None

    def take_changes(self) -> None:
        """Copy the model's values to the engine if they were changed since they were returned to it."""
        if self._returned is None:
            return
        present = self._versions()
        is_same = len(present) == len(self._returned) and all(
            tensor is before and version == version_before
            for (tensor, version), (before, version_before) in zip(
                present, self._returned, strict=True
            )
        )
        if self.engine.average(float(is_same)) < 1:
            self.engine.load_state_dict(self.model.state_dict(), strict=False)
            self._returned = present

    def _versions(self) -> list[tuple[Tensor, int]]:
        return [
            (tensor, tensor._version) for tensor, _ in NamedTensors(self.model).names_by_tensor()
        ]

    def _compiled(self, batch: Batch, shapes: str | None, earlier: Earlier) -> CompiledProgram:
        options: CompileKeywords = {**self._options, "optimizer": self._optimizer, "shapes": shapes}
        # The trainer's loss counts labels itself.
        options["micro_steps"] = _of_batches(options.get("micro_steps", 1))
        # A trainer evaluates with the model in evaluation mode.
        self.model.train()
        return compile_following(
            earlier,
            self.model,
            batch,
            loss=partial(_program_loss, self._loss, has_outputs=self._has_outputs),
            **options,
        )


def _of_batches(micro_steps: int | MicroSteps) -> MicroSteps:
    """Return micro-steps whose mean is that of the batches' losses."""
    if isinstance(micro_steps, int):
        return MicroSteps(count=micro_steps, mean_over="batches")
    return micro_steps.model_copy(update={"mean_over": "batches"})


def _program_loss(
    trainer_loss: TrainerLoss, module: nn.Module, tree: Mapping[str, object], *, has_outputs: bool
) -> object:
    """Compute the loss of a program, whose batch is the tree of a ``TrainerBatch``."""
    inputs, num_items, micro_steps = tree[_INPUTS], tree.get(_NUM_ITEMS), tree[_MICRO_STEPS]
    assert isinstance(inputs, Mapping)
    assert isinstance(num_items, Tensor | None)
    assert isinstance(micro_steps, Tensor)
    value, outputs = trainer_loss(module, dict(inputs), num_items, micro_steps)
    return (value, outputs) if has_outputs else value
