"""The steps of a LightningModule as the loss function of a program, and what they log.

A program is compiled from one call of ``training_step`` and one of ``validation_step``. Each logged value must be one
that the program computes: the loss in training, any tensor in an evaluation. A value that would be constant in every
step, because it is read from the trainer or is a Python number, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NoReturn, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from zeroir.errors import UserError

BATCH: Final = "batch"
INDEX: Final = "batch_idx"
LOGGED: Final = "logged"
RETURNED: Final = "returned"

Tree = dict[str, object]
"""A batch in the form of programs: under ``BATCH`` the data loader's, and under ``INDEX`` its index as a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A call of ``LightningModule.log``: the name, and the arguments other than the value."""

    name: str
    options: Mapping[str, object]

    def repeat(self, module: LightningModule, value: Tensor) -> None:
        """Log a new value."""
        log = cast("Callable[..., None]", module.log)
        log(self.name, value, **self.options)


@dataclass(slots=True, kw_only=True)
class StepLogs:
    """What ``training_step`` and ``validation_step`` log, in order; known once the program is compiled."""

    training: list[Log] = field(default_factory=list)
    validation: list[Log] = field(default_factory=list)


def program_loss(logs: StepLogs) -> Callable[[nn.Module, Tree], object]:
    """Return the loss function of a program, which accepts a ``Tree`` and records in ``logs`` what the steps log.

    Its outputs are a dictionary of the tensors that ``validation_step`` logs, by their position, and of its result.
    """

    def loss(module: nn.Module, tree: Tree) -> object:
        assert isinstance(module, LightningModule)
        # The methods are named here, so that a change of what they read counts.
        if module.training:
            value, logs.training = _training_loss(module, module.training_step, tree)
            return value
        value, outputs, logs.validation = _evaluation(module, module.validation_step, tree)
        return value, outputs

    return loss


def _training_loss(
    module: LightningModule, step: Callable[..., object], tree: Tree
) -> tuple[Tensor, list[Log]]:
    returned, calls = _called(module, step, tree)
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor):
        raise UserError(
            f"training_step must return the loss, a tensor, or a dictionary with it, not {type(loss).__name__}."
        )
    for log, value in calls:
        if value is not loss:
            raise UserError(
                f"training_step logs '{log.name}', which is not the loss that it returns. A training step of a program "
                "yields its loss alone: log other values in validation_step."
            )
    return loss, [log for log, _ in calls]


def _evaluation(
    module: LightningModule, step: Callable[..., object], tree: Tree
) -> tuple[Tensor, dict[str, object], list[Log]]:
    """Call the step of an evaluation: ``validation_step``, or ``training_step`` if the module lacks it."""
    if not is_overridden("validation_step", module):
        loss, _ = _training_loss(module, module.training_step, tree)
        return loss, {}, []
    returned, calls = _called(module, step, tree)
    for log, value in calls:
        if not isinstance(value, Tensor):
            raise UserError(
                f"validation_step logs '{log.name}', which is a {type(value).__name__} and not a tensor of this batch: "
                "return the predictions, and compute the metric from them in on_validation_batch_end."
            )
    outputs: dict[str, object] = {
        LOGGED: {str(position): value for position, (_, value) in enumerate(calls)}
    }
    if returned is not None:
        outputs[RETURNED] = returned
    return torch.zeros(()), outputs, [log for log, _ in calls]


def _called(
    module: LightningModule, step: Callable[..., object], tree: Tree
) -> tuple[object, list[tuple[Log, object]]]:
    """Call a step of the module, and return its result and its calls of ``log`` with their values."""
    arguments = [tree[BATCH]]
    if is_param_in_hook_signature(step, INDEX, min_args=2):
        arguments.append(tree[INDEX])
    calls: list[tuple[Log, object]] = []
    with _recording(module, calls, step.__name__):
        return step(*arguments), calls


@contextmanager
def _recording(
    module: LightningModule, calls: list[tuple[Log, object]], step: str
) -> Iterator[None]:
    """Record what the module logs, and make it fail if it reads the trainer."""

    def log(name: str, value: object, *positional: object, **options: object) -> None:
        if positional:
            raise UserError(
                f"{step} logs '{name}' with positional arguments: name them, as in self.log(..., prog_bar=True)."
            )
        calls.append((Log(name=name, options=options), value))

    attributes = vars(module)
    trainer = attributes.get("_trainer")
    attributes["_trainer"], attributes["log"] = _NoTrainer(step=step), log
    try:
        yield
    finally:
        attributes["_trainer"] = trainer
        del attributes["log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoTrainer:
    """The trainer's replacement while a step is compiled."""

    step: str

    def __getattr__(self, name: str) -> NoReturn:
        raise UserError(
            f"{self.step} reads '{name}' of the trainer, which may change from step to step, while the step is "
            "compiled once: read it in a hook, such as on_train_batch_end, or put it into the batch."
        )


def logged_values(outputs: object) -> list[Tensor]:
    """Return the tensors that ``validation_step`` has logged, in order, from the outputs of an evaluation."""
    values = _part(outputs, LOGGED)
    return list(cast("Mapping[str, Tensor]", values).values()) if values is not None else []


def returned_value(outputs: object) -> object:
    """Return the result of ``validation_step`` from the outputs of an evaluation."""
    return _part(outputs, RETURNED)


def _part(outputs: object, name: str) -> object:
    return outputs.get(name) if isinstance(outputs, Mapping) else None
