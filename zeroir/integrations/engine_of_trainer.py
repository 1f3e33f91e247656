"""The engine of a trainer of another library, and the programs that it runs, one for each batch shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroir.api import CompiledProgram, compile_model
from zeroir.config.steps import MicroSteps
from zeroir.errors import UserError
from zeroir.integrations.fitted_batches import BatchShape, Inputs, largest, padded
from zeroir.runtime.state.named_tensors import NamedTensors

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


def _require_values(module: nn.Module, _arguments: object) -> None:
    """Raise a UserError if the model is called while its values are in an engine."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise UserError(_CANNOT_COMPUTE)


class EngineOfTrainer:
    """One engine, and the programs of a model that it has run so far, one for each batch shape.

    ``loss`` is compiled into the programs. ``optimizer`` is a torch optimizer over the model's parameters. The other
    arguments are those of ``zeroir.compile`` and ``CompiledProgram.engine``. Ids are padded with ``pad_token``, and
    ``most_positions`` is the model's maximum length, if it has one. Each method is collective over all ranks.
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
        pad_token: int,
        most_positions: int | None,
        seed: int,
        timeout: timedelta,
        kernels: str,
    ) -> None:
        self.model = model
        self.wrapped = WrappedModel(model)
        self._loss = loss
        self._example = example
        self._optimizer = optimizer
        self._options = options
        self._pad_token = pad_token
        self._most_positions = most_positions
        self._programs: dict[tuple[BatchShape, bool], CompiledProgram] = {}
        self._returned: list[tuple[Tensor, int]] | None = None
        self._watch: RemovableHandle | None = None
        self.shape = BatchShape.of(example.inputs)
        self.has_outputs = has_outputs
        self.engine: Engine = self._program().engine(seed=seed, kernels=kernels, timeout=timeout)
        self._watch = model.register_forward_pre_hook(_require_values)

    def micro_step(self, batch: TrainerBatch, *, is_last: bool) -> MicroStepResult:
        """Run a micro-step; ``fit`` has ensured that its batch fits."""
        self._returned = None
        return self.engine.micro_step(self._fitted(batch).tree(), is_last=is_last)

    def evaluate(self, batch: TrainerBatch) -> Evaluation:
        """Evaluate a batch; ``fit`` has ensured that it fits."""
        return self.engine.evaluate(self._fitted(batch).tree())

    def fit(
        self, batches: Sequence[Inputs], *, in_rows_of_the_program: bool, needs_outputs: bool
    ) -> int:
        """Switch to a program with room for these batches of any rank, and return the most rows of any.

        With ``in_rows_of_the_program`` the batches will be split, so only their lengths count.

        Raises:
            UserError: if the ranks' batches have different tensors, or a new program cannot be compiled.
        """
        own = largest(BatchShape.of(batch) for batch in batches)
        needed = own
        if not self.engine.job.is_alone:
            rows = self.engine.job.exchange([len(own.lengths), *own.numbers()])
            if len({row[0] for row in rows}) > 1:
                raise UserError(
                    "The batches of two ranks have different tensors: let the data collator give the same ones on "
                    "every rank."
                )
            needed = largest(own.with_numbers([int(number) for number in row[1:]]) for row in rows)
        most_rows = needed.rows
        if in_rows_of_the_program:
            needed = needed.with_numbers([self.shape.rows, *needed.numbers()[1:]])
        shape = self.shape.grown(needed, self._most_positions)
        if shape != self.shape or (needs_outputs and not self.has_outputs):
            self.shape, self.has_outputs = shape, self.has_outputs or needs_outputs
            self.engine.go_on_with(self._program().program)
        return most_rows

    def return_values(self) -> None:
        """Return the model's values to it, on the CPU; ``take_changes`` detects later changes."""
        self.engine.return_values(self.model)
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
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

    @contextmanager
    def _not_watched(self) -> Iterator[None]:
        """Allow the compiler to call the model, whose values it does not need."""
        watch = self._watch
        if watch is None:
            yield
            return
        watch.remove()
        try:
            yield
        finally:
            self._watch = self.model.register_forward_pre_hook(_require_values)

    def _versions(self) -> list[tuple[Tensor, int]]:
        return [
            (tensor, tensor._version) for tensor, _ in NamedTensors(self.model).names_by_tensor()
        ]

    def _fitted(self, batch: TrainerBatch) -> TrainerBatch:
        return TrainerBatch(
            inputs=padded(batch.inputs, self.shape, self._pad_token),
            num_items=batch.num_items,
            micro_steps=batch.micro_steps,
        )

    def _program(self) -> CompiledProgram:
        """Return the program for the current shape, compiled if it is new."""
        key = self.shape, self.has_outputs
        if key not in self._programs:
            options: CompileKeywords = {**self._options, "optimizer": self._optimizer}
            # The trainer's loss counts labels itself.
            options["micro_steps"] = _of_batches(options.get("micro_steps", 1))
            # An evaluation may need a longer program, and a trainer evaluates with the model in evaluation mode.
            self.model.train()
            with self._not_watched():
                self._programs[key] = compile_model(
                    self.model,
                    self._fitted(self._example).tree(),
                    loss=_program_loss(self._loss, has_outputs=self.has_outputs),
                    **options,
                )
        return self._programs[key]


def _of_batches(micro_steps: int | MicroSteps) -> MicroSteps:
    """Return micro-steps whose mean is that of the batches' losses."""
    if isinstance(micro_steps, int):
        return MicroSteps(count=micro_steps, mean_over="batches")
    return micro_steps.model_copy(update={"mean_over": "batches"})


def _program_loss(
    trainer_loss: TrainerLoss, *, has_outputs: bool
) -> Callable[[nn.Module, Mapping[str, object]], object]:
    """Return the loss function of a program, whose batch is the tree of a ``TrainerBatch``."""

    def loss(module: nn.Module, tree: Mapping[str, object]) -> object:
        inputs, num_items, micro_steps = (
            tree[_INPUTS],
            tree.get(_NUM_ITEMS),
            tree[_MICRO_STEPS],
        )
        assert isinstance(inputs, Mapping)
        assert isinstance(num_items, Tensor | None)
        assert isinstance(micro_steps, Tensor)
        value, outputs = trainer_loss(module, dict(inputs), num_items, micro_steps)
        return (value, outputs) if has_outputs else value

    return loss
