"""The model as a function that a tracer can trace: from the tensors of a batch and the seeds to the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend._torch_private import tensors_replaced, whole_operators
from zeroir.frontend.block_recording import ForwardRecorder, ForwardRecording
from zeroir.frontend.block_reuse import ReusePlan
from zeroir.frontend.gradient_hooks import ParameterHooks
from zeroir.frontend.module_tensors import substitute_buffers, write_back_buffers
from zeroir.frontend.node_origins import OriginTracker
from zeroir.frontend.precision import cast_floating
from zeroir.frontend.python_state import PythonState
from zeroir.frontend.source import ModelSource, capitalised
from zeroir.frontend.units import find_units
from zeroir.torch_ops.neutral import NeutralOps


class LossStep(nn.Module):
    """The model as a function from the tensors of a batch and the seeds, i64, to the loss, an FP32 scalar.

    Each forward of the model begins with the Python state ``state``. With a ``plan`` the forward is that which was
    recorded, and the model's code does not run. ``blocks`` names the repeated blocks, ``sites`` counts the calls of
    dropout and of random operators in the model's last forward, and ``tracker`` knows where in the model each node of
    that forward comes from.
    """

    PREFIX = "model."

    def __init__(
        self,
        model: nn.Module,
        source: ModelSource,
        example: object,
        dtype: torch.dtype,
        hooks: ParameterHooks,
        state: PythonState,
    ) -> None:
        super().__init__()
        # Tracked frames end at this file, since it calls the model.
        self.tracker = OriginTracker(folder=source.folder, stop=__file__)
        self.tracker.install(model)
        self.blocks = tuple(find_units(model, None).labels)
        for name in self.blocks:
            # Next to the forward: all other hooks of the block run outside the recorded call.
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name))
            block.register_forward_hook(partial(self._leave, name), prepend=True)
        self.model = model
        self.sites = 0
        self.plan: ReusePlan | None = None
        self.state = state
        self._source = source
        self._example = example
        self._dtype = dtype
        self._hooks = hooks
        self._recorder: ForwardRecorder | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss, from the tensors of a batch and then the seeds."""
        *tensors, seeds = inputs
        # The parameters are now tensors of the tracer, which have no hooks.
        self._hooks.attach(self.model)
        with whole_operators():
            if self.plan is not None:
                return self.plan.repeat(
                    [*inputs, *self._model_tensors().values()], seeds, self.tracker
                )
            with NeutralOps(seeds, self.tracker.around) as neutral:
                return self._loss(tensors, neutral)

    def record(self, inputs: Sequence[Tensor]) -> ForwardRecording:
        """Run the model once, leave its buffers as they are, and return the recorded calls.

        Raises:
            UnrecordableError: where the calls cannot be made again.
            Exception: any error of the model or of torch.
        """
        *tensors, seeds = inputs
        # As in a trace, tied parameters are different tensors.
        own = {
            name: torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
            for name, tensor in self._model_tensors().items()
        }
        with tensors_replaced(self, own), whole_operators(), NeutralOps(seeds) as neutral:
            recorder = ForwardRecorder(
                neutral, self.tracker, [*inputs, *self._model_tensors().values()]
            )
            self._recorder = recorder
            try:
                with recorder.autograd_functions(), recorder:
                    loss = self._loss(tensors, neutral)
            finally:
                self._recorder = None
        return recorder.recording(loss)

    def _model_tensors(self) -> dict[str, Tensor]:
        """The model's present parameters and buffers by each of their names."""
        return {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

    def _enter(self, block: str, _: nn.Module, __: object) -> None:
        if self._recorder is not None:
            self._recorder.enter(block)

    def _leave(self, block: str, _: nn.Module, __: object, ___: object) -> None:
        if self._recorder is not None:
            self._recorder.leave(block)

    def checkpointing(self) -> AbstractContextManager[None]:
        """The context in which the model's code runs under an activation checkpoint."""
        return self.tracker.checkpoint()

    def _loss(self, tensors: Sequence[Tensor], neutral: NeutralOps) -> Tensor:
        self.tracker.restart()
        self.state.restore()
        copies = substitute_buffers(self.model)
        batch = cast_floating(_rebuilt(self._example, list(tensors)), self._dtype)
        # A copy, because the model may return a parameter itself.
        loss = loss_of(self._source, self.model, batch).float().clone()
        write_back_buffers(copies)
        self.sites = neutral.sites
        return loss


def call_with(model: Callable[..., object], batch: object) -> object:
    """Call a module on a batch: a dict gives keyword arguments, a tuple positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def loss_of(source: ModelSource, model: nn.Module, batch: object) -> Tensor:
    """The loss of a module on a batch, a tensor without axes.

    It is what the source's loss function returns, or what forward returns: the object itself, or its attribute or key
    ``loss``. A loss function may return a pair of the loss and outputs.

    Raises:
        UserError: where there is none, or where it is not one floating-point number that depends on a parameter.
    """
    name = capitalised(source.names.loss)
    if source.loss is None:
        output = call_with(model, batch)
    else:
        output = source.loss(model, batch)
        if isinstance(output, tuple) and len(output) == 2:
            output = output[0]
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UserError(
            f"{name} must return the loss: a scalar tensor, or an object or dict with a tensor called loss; it "
            f"returned {type(output).__name__}"
            + (
                f" whose loss is {type(loss).__name__}."
                if loss is not None
                else ", which has none."
            )
        )
    if loss.numel() != 1:
        raise UserError(
            f"The model's loss must be one number, but it has the shape {tuple(loss.shape)}; return its mean or "
            "sum."
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
