"""Tensors without values that stand in the user's modules while the values are elsewhere.

They have a shape, a dtype and a device; every computation with them raises UserError, which says where the values are.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from zeroir.errors import UserError

_READABLE: Final[frozenset[object]] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                "_backward_hooks",
                "_post_accumulate_grad_hooks",
                "_version",
                "device",
                "dtype",
                "grad",
                "grad_fn",
                "is_cpu",
                "is_cuda",
                "is_leaf",
                "is_meta",
                "is_quantized",
                "is_sparse",
                "itemsize",
                "layout",
                "nbytes",
                "ndim",
                "requires_grad",
                "shape",
            )
        ),
        getattr(Tensor, "grad").__set__,  # noqa: B009 - optimizers set it to None
        Tensor.__hash__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_complex,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_inference,
        Tensor.ndimension,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
        Tensor.storage_offset,
        Tensor.stride,
    }
)
"""What does not need values."""

_HOME: Final = "_home"
_IS_PARAMETER: Final = "_is_param"

_GRADIENT_READ: Final[object] = getattr(Tensor, "grad").__get__  # noqa: B009
_IS_META: Final[object] = getattr(Tensor, "is_meta").__get__  # noqa: B009
_NOT_THE_USERS: Final = (
    *("site-packages", "dist-packages"),
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_paths()["stdlib"],
)
"""Parts of the names of files whose code may look at gradients, and finds none."""

_GRADIENT_SET: Final[object] = getattr(Tensor, "grad").__set__  # noqa: B009
_USES_GRADIENTS: Final = tuple(
    str(Path(torch.__file__).parent / name) for name in ("optim", "nn/utils", "amp")
)
"""Folders with the code of torch's that updates parameters, or clips or unscales their gradients."""

_OF_TRAINING: Final[frozenset[object]] = frozenset(
    {Tensor.requires_grad_, getattr(Tensor, "requires_grad").__set__}  # noqa: B009
)
"""What changes which parameters are trained, which the next step compares."""


class AbsentTensor(Tensor):
    """A tensor on the meta device whose use raises UserError with the sentence ``absence``; ``text`` is its repr.

    ``flag_changes`` counts the changes of ``requires_grad`` of all tensors of the class.
    """

    absence: ClassVar[str]
    flag_changes: ClassVar[int] = 0
    text: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Raise an error for computations with values that are not here."""
        if func in _OF_TRAINING:
            cls.flag_changes += 1
        if func in _READABLE or func in _OF_TRAINING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__repr__:
            return f"{cls.__name__}({cls.text})"
        raise UserError(cls.absence)


class ReturnedTensor(AbsentTensor):
    """A gathered tensor after its block."""

    absence = (
        "This module was lent by engine.gathered(...), whose block has ended: its values are freed. Compute with it "
        "inside the block, or copy what you need there."
    )
    text = "freed at the end of the block of engine.gathered"


@cache
def unlent_tensor(unit: str) -> type[AbsentTensor]:
    """Return the class of tensors of a unit that is not among those that ``engine.gathered`` lends."""
    absence = (
        f"This parameter is of unit {unit}, which engine.gathered(units=...) does not lend here: add {unit} to the "
        "units, or compute with those that are lent alone."
    )
    values: dict[str, object] = {"absence": absence, "text": f"of unit {unit}, which is not lent"}
    return cast("type[AbsentTensor]", type("UnlentTensor", (AbsentTensor,), values))


class Lender(Protocol):
    """Has the values of tensors that an engine has taken."""

    def lent(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return the present values of the module's tensors of these names, unsharded. All ranks call this together."""


class Home(NamedTuple):
    """Where the values of a tensor are, and its name there."""

    lender: Lender
    name: str


class MovedTensor(AbsentTensor):
    """A tensor of the user's module whose values an engine has taken; ``home_of`` says where they are."""

    absence = (
        "The values of this module are in the engine that was made from it: compute with engine.evaluate(batch) or "
        "within `with engine.gathered() as module`, read them with engine.state_dict(), or call engine.close(), which "
        "gives them back."
    )
    text = "its values are in the engine"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Raise an error where code would use gradients that are not here, or load values."""
        if func == _GRADIENT_SET and args[1] is not None:
            raise UserError(
                "The gradients of this module are in the engine, which computes them itself: a gradient that is set "
                "does not count. Add what it stands for to the loss."
            )
        if func == _GRADIENT_READ:  # each access makes a new method wrapper
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(_USES_GRADIENTS) and code.co_name != "zero_grad":
                raise UserError(
                    "The gradients of this module are in the engine, which clips and updates: call engine.step(batch), "
                    "leave out the optimizer's step(), and clip with clip= of zeroir.compile; result.grad_norm has the "
                    "norm."
                )
            if not any(part in code.co_filename for part in _NOT_THE_USERS):
                raise UserError(
                    "The gradients of this module are in the engine, and zeroed there: read them with "
                    "engine.gradients(), or their norms with engine.gradient_norms() or result.grad_norm."
                )
        # Torch collects the errors of the copies that follow.
        if func == _IS_META and sys._getframe(1).f_code.co_name == "_load_from_state_dict":
            raise UserError(
                "The values of this module are in the engine that was made from it: load others with "
                "engine.load_state_dict(state)."
            )
        return super().__torch_function__(func, types, args, kwargs)


def home_of(tensor: Tensor) -> Home | None:
    """Return where the values of a tensor are, if an engine has taken them."""
    known = vars(tensor).get(_HOME) if isinstance(tensor, MovedTensor) else None
    if known is None:
        return None
    lender, name = known
    present = lender()
    return None if present is None else Home(present, name)


def set_home(tensor: Tensor, home: Home) -> None:
    """Let a tensor without values say where they are, which does not keep an engine alive."""
    if isinstance(tensor, MovedTensor):
        vars(tensor)[_HOME] = (weakref.ref(home.lender), home.name)


def forget_home(tensor: Tensor) -> None:
    """Let a tensor that has its values again be as before ``absent`` and ``set_home``."""
    for name in (_HOME, _IS_PARAMETER):
        vars(tensor).pop(name, None)


def absent(tensor: Tensor, kind: type[AbsentTensor]) -> Tensor:
    """Return a tensor like this one, a parameter or not, without values."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
        empty = torch.empty_like(tensor.detach(), device="meta")
        made: Tensor = torch.Tensor._make_subclass(kind, empty, tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        vars(made)[_IS_PARAMETER] = True
    return made
