"""The user's module, built whole by the user's own code, and its tensors by name.

Nothing stands between the constructor and torch: the values are those of ``torch.manual_seed(seed); model()`` because
that is what runs. In a job rank 0 alone does it, and hands the values out (see ``initial``).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.runtime.tensors import IR_DTYPE
from zeroir.torch_ops.globals import torch_globals_kept

Factory = Callable[[], nn.Module]


class ModuleTensors:
    """The tensors of a module by fully-qualified name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = dict(module.named_buffers(remove_duplicate=False))
        self._tensors.update(module.named_parameters(remove_duplicate=False))
        self._last: tuple[str, Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        """The tensor, itself and not a copy; UserError where the module has none of that name."""
        found: object = self._tensors.get(name)
        if found is None:  # a tensor that is a plain attribute
            with contextlib.suppress(AttributeError):
                found = operator.attrgetter(name)(self._module)
        if isinstance(found, Tensor):
            return found.detach()
        raise UserError(
            f"The model has no parameter or buffer '{name}', which the program was compiled with; "
            "compile it again from this model file."
        )

    def elements(self, name: str) -> Tensor:
        """The tensor, flat and row-major: itself, or a copy that is kept until the next is asked for."""
        if self._last is None or self._last[0] != name:
            self._last = name, self.tensor(name).reshape(-1)
        return self._last[1]


def construct(program: Program, factory: Factory, seed: int) -> ModuleTensors:
    """Build the module that the program was compiled from, under ``torch.manual_seed(seed)``.

    torch's generators and other globals are left as they were, or this rank would compute unlike those that build none.

    Raises:
        UserError: where the module lacks a tensor of the program, or has it in another shape or without values.
    """
    with torch_globals_kept():
        torch.manual_seed(seed)
        module = ModuleTensors(factory())
    shapes = {slot.name: slot.shape for flat in program.flats for slot in flat.slots}
    shapes |= {b.name: b.shape for b in program.module_buffers if b.data is None}
    for name, shape in shapes.items():
        found = module.tensor(name)
        if tuple(found.shape) != shape:
            raise UserError(
                f"The model's '{name}' has the shape {list(found.shape)}, but the program was compiled with "
                f"{list(shape)}; compile it again from this model file."
            )
        if found.is_meta or found.dtype not in IR_DTYPE:
            what = "is on the meta device" if found.is_meta else f"has the dtype {found.dtype}"
            raise UserError(
                f"The model's '{name}' {what}, so the program has no values to begin with; let the model make it on "
                "the CPU, in a dtype that it was compiled with."
            )
    return module
