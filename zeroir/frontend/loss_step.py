"""The model as a function that a tracer can trace: from the tensors of a batch and the seeds to the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend._torch_private import whole_operators
from zeroir.frontend.block_recording import BlockCall, BlockRecorder, ObservedBlocks
from zeroir.frontend.block_reuse import BlockReplacer, ReusePlan
from zeroir.frontend.gradient_hooks import ParameterHooks
from zeroir.frontend.module_tensors import (
    BufferCopy,
    restore_buffers,
    substitute_buffers,
    write_back_buffers,
)
from zeroir.frontend.node_origins import OriginTracker
from zeroir.frontend.precision import cast_floating
from zeroir.frontend.python_state import PythonState
from zeroir.frontend.units import find_units
from zeroir.torch_ops.neutral import NeutralOps


class LossStep(nn.Module):
    """The model as a function from the tensors of a batch and the seeds, i64, to the loss, an FP32 scalar.

    Each forward begins with the Python state ``state``. With a ``plan`` equal blocks are replaced by one node each.
    ``sites`` counts the calls of dropout and of random operators in the last forward, and ``tracker`` knows where in
    the model each node of that forward comes from.
    """

    PREFIX = "model."

    def __init__(
        self,
        model: nn.Module,
        example: object,
        folder: Path,
        dtype: torch.dtype,
        hooks: ParameterHooks,
        state: PythonState,
    ) -> None:
        super().__init__()
        # Tracked frames end at this file, since it calls the model.
        self.tracker = OriginTracker(folder=folder, stop=__file__)
        self.tracker.install(model)
        self.blocks = ObservedBlocks(names=tuple(find_units(model, None).labels))
        self.blocks.install(model)
        self.model = model
        self.sites = 0
        self.plan: ReusePlan | None = None
        self.state = state
        self._example = example
        self._dtype = dtype
        self._hooks = hooks

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss, from the tensors of a batch and then the seeds."""
        self.tracker.restart()
        *tensors, seeds = inputs
        self.state.restore()
        # The parameters are now tensors of the tracer, which have no hooks.
        self._hooks.attach(self.model)
        neutral = NeutralOps(seeds, self.tracker.around)
        with whole_operators(), neutral, contextlib.ExitStack() as stack:
            if self.plan is not None:
                replacer = BlockReplacer(self.plan, neutral, self.tracker)
                stack.enter_context(self.blocks.observed_by(replacer))
                stack.enter_context(replacer.autograd_functions())
                stack.enter_context(replacer)
            copies = substitute_buffers(self.model)
            loss = self._loss(tensors)
            write_back_buffers(copies)
        self.sites = neutral.sites
        return loss

    def record_blocks(self, inputs: Sequence[Tensor]) -> list[BlockCall]:
        """Run the model once, leave its buffers as they are, and return the recorded calls of its blocks."""
        *tensors, seeds = inputs
        self.state.restore()
        neutral = NeutralOps(seeds)
        recorder = BlockRecorder(
            neutral, [*inputs, *self.model.parameters(), *self.model.buffers()]
        )
        with (
            whole_operators(),
            neutral,
            self.blocks.observed_by(recorder),
            recorder.autograd_functions(),
        ):
            copies: list[BufferCopy] = []
            try:
                with recorder:
                    copies = substitute_buffers(self.model)
                    self._loss(tensors)
            finally:
                restore_buffers(copies)
        return recorder.block_calls()

    def checkpointing(self) -> AbstractContextManager[None]:
        """The context in which the model's code runs under an activation checkpoint."""
        return self.tracker.checkpoint()

    def _loss(self, tensors: Sequence[Tensor]) -> Tensor:
        batch = cast_floating(_rebuilt(self._example, list(tensors)), self._dtype)
        # A copy, because the model may return a parameter itself.
        return loss_of(call_with(self.model, batch)).float().clone()


def call_with(model: nn.Module, batch: object) -> object:
    """Call a model on a batch: a dict gives keyword arguments, a tuple positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def loss_of(output: object) -> Tensor:
    """The loss in the output of a forward: the output itself, or its attribute or key ``loss``.

    Raises:
        UserError: where there is none, or where it is not one floating-point number that depends on a parameter.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UserError(
            "The model's forward must return the loss: a scalar tensor, or an object or dict with a tensor "
            f"called loss; it returned {type(output).__name__}"
            + (
                f" whose loss is {type(loss).__name__}."
                if loss is not None
                else ", which has none."
            )
        )
    if loss.numel() != 1:
        raise UserError(
            f"The model's loss must be one number, but it has the shape {tuple(loss.shape)}; take its mean or "
            "sum in forward."
        )
    if not loss.dtype.is_floating_point:
        raise UserError(
            f"The model's loss must be a floating-point number, but it is {loss.dtype}."
        )
    if not loss.requires_grad:
        raise UserError("The model's loss does not depend on any trainable parameter.")
    return loss.reshape(())


def _rebuilt(value: object, tensors: list[Tensor]) -> object:
    """A batch of the same structure with other tensors, which are taken from the front of the list."""
    if isinstance(value, Tensor):
        return tensors.pop(0)
    if isinstance(value, Mapping):
        return {key: _rebuilt(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_rebuilt(item, tensors) for item in value]
        if isinstance(value, list):
            return items
        make: Callable[..., object] | None = getattr(value, "_make", None)  # a named tuple's
        return tuple(items) if make is None else make(items)
    return value
