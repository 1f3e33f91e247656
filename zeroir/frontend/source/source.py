"""The source of a program: a model file, a module, or a function that creates the module.

The compiler and the runtime only use a source, whatever it was created from; ``entry`` creates those of model files.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import nn

from zeroir.config.shapes import BatchShapes, SizeClass
from zeroir.errors import MEMORY_REMEDY, UserError, is_out_of_memory
from zeroir.frontend.source.source_lines import line_of_definition, line_of_error, line_of_forward
from zeroir.ir.program import Flat
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.frozen_modules import users_module

_LONGEST_REASON = 300

Model = str | Path | nn.Module | Callable[[], nn.Module]
"""The user's model: a model file, a module, or a function that creates the module."""

LossFunction = Callable[..., object]
"""A function from the module and a batch to the loss, or to a pair of the loss and outputs."""

WeightFunction = Callable[..., object]
"""A function from a batch to its weight, a number or a tensor of one element."""

BatchFunction = Callable[..., Iterable[Batch]]
"""A function from (rank, world_size, seed), and for training ``start_step``, to the batches of that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceNames:
    """The names of a source's parts in messages, as the user knows them; each may begin a sentence once capitalised.

    ``model`` is the model itself ("the model in gpt.py", "the module GPT"), ``maker`` the place where its parameters
    are created ("model() in gpt.py", "the module GPT"), ``batch`` the example ("batch() in gpt.py", "the example
    batch") and ``loss`` the function whose result is the loss ("the model's forward", "loss() in gpt.py").

    ``maker_line`` and ``batch_line`` are ``file:line`` of the code that creates the model and the example, empty where
    it is unknown, as in an interactive session.
    """

    model: str
    maker: str
    batch: str
    loss: str
    maker_line: str = ""
    batch_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOrigin:
    """The model file of a source: its path as the user wrote it, its factory, and the SHA-256 of its bytes.

    ``factory`` is the text of a ``config.model_spec.Factory``, such as ``model`` or ``build(layers=12)``. ``imports``
    maps the names of the user's modules that it imports to their SHA-256.
    """

    path: Path
    factory: str
    sha256: str
    imports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a program goes on with from an earlier one of the same model.

    ``flats`` are those of the earlier logical program, where parameters keep their places. ``numbers`` names those in
    the user's code whose present values are to count at every step. ``step_counts`` has, for each parameter that was
    not trained in all steps so far, the number, from 1 on, of the count of its steps.
    """

    flats: tuple[Flat, ...] = ()
    numbers: frozenset[str] = frozenset()
    step_counts: Mapping[str, int] = field(default_factory=dict)


NOTHING_EARLIER: Final = Earlier()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model, an example batch and a loss.

    ``build`` creates a module without initial values that the caller may change; the compiler calls it under
    ``torch.device("meta")``. ``model`` creates the module with its initial values, or returns the user's own module if
    ``is_in_hand``. ``batch`` returns an example micro-batch. Without ``loss`` the loss is the result of forward;
    without ``weight`` every batch weighs 1. ``batches(rank, world_size, seed, start_step=0)`` yields training batches
    and ``eval_batches(rank, world_size, seed)`` a finite number for evaluation; both are optional.

    ``folder`` is that of the user's code: traces show its files. ``modules`` names the user's Python modules in this
    process. ``autocasts`` maps ``file:line`` to the accelerator for which that code entered autocast while it was
    loaded. ``file`` is None if there is no model file. ``shapes`` returns the shapes of the batch that depend on dims.
    ``earlier`` is what a program goes on with. With ``has_optimizer`` the script's optimizer says which parameters are
    trained, and those of other modules that the code uses are constants. ``classes`` has the values that some dims take
    instead of all in their range. With ``runs_what_decides`` the code of submodules that lets the sizes of the batch
    decide runs as it is.
    """

    names: SourceNames
    folder: Path
    build: Callable[[], nn.Module]
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: LossFunction | None = None
    weight: WeightFunction | None = None
    batches: BatchFunction | None = None
    eval_batches: BatchFunction | None = None
    modules: tuple[str, ...] = ()
    autocasts: Mapping[str, str] = field(default_factory=dict)
    file: FileOrigin | None = None
    is_in_hand: bool = False
    shapes: Callable[[], BatchShapes] | None = None
    earlier: Earlier = NOTHING_EARLIER
    has_optimizer: bool = False
    classes: Mapping[str, SizeClass] = field(default_factory=dict)
    runs_what_decides: bool = False

    def line_of_loss(self, model: nn.Module) -> str:
        """Return ``file:line`` of the function that returns the loss, or of the model's creation if that is torch's."""
        own = (
            line_of_forward(users_module(model))
            if self.loss is None
            else line_of_definition(self.loss)
        )
        return own or self.names.maker_line

    def place_of(self, error: BaseException) -> str:
        """Return the line of an exception in the model's code, or of the code that creates the model, or its name."""
        return line_of_error(error) or self.names.maker_line or self.names.model

    def explain(self, error: BaseException, what: str) -> str:
        """Return one sentence on an exception in the model's code: what failed, where, and why."""
        return explain(error, line_of_error(error) or self.names.maker_line, what)


def explain(error: BaseException, line: str | None, what: str) -> str:
    """Return one sentence on an exception in the user's code: what failed, the line where it did, and why."""
    location = f" at {line}" if line else ""
    if is_out_of_memory(error):
        return f"{what}{location}, because memory ran out: {MEMORY_REMEDY}."
    reason = " ".join(str(error).split()) or "no message"
    if len(reason) > _LONGEST_REASON:
        reason = reason[: _LONGEST_REASON - 1] + "…"
    return f"{what}{location}: {type(error).__name__}: {reason}"


def takes_positional(function: Callable[..., object], counts: Collection[int]) -> bool:
    """Return whether a function accepts one of these numbers of arguments.

    True where unknown, as for functions in C.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    for count in counts:
        with contextlib.suppress(TypeError):
            signature.bind(*range(count))
            return True
    return False


def capitalised(name: str) -> str:
    """Return a name that can begin a sentence; code such as ``model()`` is not capitalised."""
    return name[0].upper() + name[1:] if name.startswith("the ") else name


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}


def require_same_parameters(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], what: str, maker: str
) -> None:
    """Raise a UserError if a model's parameters differ from ``shapes``, those that ``maker`` created.

    ``what`` is the user's code that changed them.
    """
    current = parameter_shapes(model)
    for name in sorted(current.keys() | shapes.keys()):
        if current.get(name) != shapes.get(name):
            verb = (
                "adds" if name not in shapes else "removes" if name not in current else "reshapes"
            )
            raise UserError(
                f"{what} {verb} the parameter {name}: make all parameters in {maker}, as they are to be trained."
            )
