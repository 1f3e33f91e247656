"""The values that the user's code returns for a batch: the loss, and the outputs of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend.source.source import ModelSource, capitalised
from zeroir.frontend.source.source_lines import refusals_at
from zeroir.frontend.watch.stored_tensors import has_tensors
from zeroir.ir.output_paths import OutputPathError, children, key_step
from zeroir.torch_ops.batches import undense_kind
from zeroir.torch_ops.frozen_modules import users_module
from zeroir.torch_ops.returned import is_returned_kept, keep_returned

PathTensors = tuple[tuple[str, Tensor], ...]
"""The tensors of an evaluation's outputs, each with its path (``zeroir.ir.output_paths``)."""


class UnknownOutputError(UserError):
    """The user requests an output that the model does not have."""


def call_with(model: Callable[..., object], batch: object) -> object:
    """Call a module on a batch: a dict becomes keyword arguments, a tuple positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def loss_of(source: ModelSource, model: nn.Module, batch: object) -> Tensor:
    """Return the loss of a module on a batch, a tensor without dimensions.

    It is the result of the source's loss function, or of forward: the object itself, the first of a tuple, or its
    attribute or key ``loss``. What is returned beside it is kept if the model asks for that.

    Raises:
        UserError: if there is none, or if it is not one floating-point number that depends on a parameter.
    """
    output, second = _returned(source, model, batch)
    users = users_module(model)
    if is_returned_kept(users):
        beside = _beside_loss(output) if second is None else second
        if has_tensors(beside):
            keep_returned(users, beside)
    with refusals_at(lambda: source.line_of_loss(model)):
        loss = _loss(source, output)
        if not loss.requires_grad:
            raise UserError("The model's loss does not depend on any trainable parameter.")
    return loss


def evaluated(
    source: ModelSource, model: nn.Module, batch: object, outputs: Sequence[str]
) -> tuple[Tensor, PathTensors]:
    """Return the loss of a module on a batch, a tensor without dimensions, and the outputs of an evaluation.

    The outputs are what is returned after the loss in a tuple. With ``outputs`` they are a dict of the
    values with these names in that part or, where there is no tuple, in the object that contains the loss.

    Raises:
        UserError: if the loss is invalid, an output is missing, or one is not a tensor.
    """
    first, second = _returned(source, model, batch)
    named = first if second is None else second
    tensors: list[tuple[str, Tensor]] = []
    with refusals_at(lambda: source.line_of_loss(model)):
        if outputs:
            for name in outputs:
                value = _part(named, name)
                if value is None:
                    raise UnknownOutputError(
                        f"{capitalised(source.names.loss)} returns no output called {name}; it returns "
                        f"{_described(named)}."
                    )
                tensors += _tensors(source, value, key_step(name))
        elif second is not None:
            tensors += _tensors(source, second, "")
        return _loss(source, first), tuple(tensors)


def _returned(source: ModelSource, model: nn.Module, batch: object) -> tuple[object, object]:
    """Return the result of the user's code and None, or of a tuple the first part and the rest."""
    model = users_module(model)
    output = call_with(model, batch) if source.loss is None else source.loss(model, batch)
    if not isinstance(output, tuple) or hasattr(output, "loss") or len(output) < 2:
        return output, None
    first, *rest = output
    return first, rest[0] if len(rest) == 1 else tuple(rest)


def _beside_loss(output: object) -> object:
    """Return what has tensors beside the loss in an object that contains it."""
    if isinstance(output, Tensor):
        return None
    names = output if isinstance(output, Mapping) else getattr(output, "__dataclass_fields__", ())
    parts = {name: _part(output, name) for name in names if name != "loss"}
    return {name: part for name, part in parts.items() if has_tensors(part)}


def _part(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, Tensor):  # of a class of torch's tracer
        return "a tensor"
    return f"a {type(value).__name__}"


def _tensors(source: ModelSource, value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an output, each with its path."""
    what = f"{capitalised(source.names.loss)} returns outputs that"
    if isinstance(value, Tensor):
        kind = undense_kind(value)
        if kind is not None:
            raise UserError(f"{what} have {kind} at {path or 'their top'}: return dense tensors.")
        yield path, value
        return
    try:
        parts = children(value)
    except OutputPathError as error:
        raise UserError(f"{what} {error}.") from None
    if parts is None:
        raise UserError(
            f"{what} have a {type(value).__name__} at {path or 'their top'}: return tensors, in dicts, lists, tuples "
            "or dataclasses."
        )
    for step, part in parts:
        yield from _tensors(source, part, path + step)


def _loss(source: ModelSource, output: object) -> Tensor:
    """Return the loss in the result of the user's code: the object itself, or its attribute or key ``loss``."""
    name = capitalised(source.names.loss)
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UserError(
            f"{name} must return the loss: a scalar tensor, a tuple that begins with it, or an object or dict with a "
            f"tensor called loss; it returned {type(output).__name__}"
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
    return loss.reshape(())
