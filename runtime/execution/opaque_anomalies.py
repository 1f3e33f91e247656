"""Finds the first NaN in code that runs as it is: a mode that looks at the operators of a call while they run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zeroir.torch_ops.opaque import OpaqueCall

See = Callable[[str, str, Sequence[Tensor], Sequence[Tensor]], object]
"""Takes the name of an operator, the line that calls it, its operands, and its results."""

_MOST_LINES: Final = 1_000_000
"""Forwards whose backward never comes are forgotten."""


class SeenCalls:
    """An observer of opaque calls, which shows their operators to ``see``.

    An operator of the backward has the line of the forward that autograd called it for.
    """

    def __init__(self, see: See) -> None:
        self._see = see
        self._lines: OrderedDict[int, str] = OrderedDict()

    def __call__(self, called: OpaqueCall, call: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Make a call."""
        with _SeenOperators(self._see, called.line_here, self._lines):
            return call()


class _SeenOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self, see: See, line_here: Callable[[], str], lines: OrderedDict[int, str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self._line_here = line_here
        self._lines = lines

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        node: Node | None = torch._C._current_autograd_node()  # torch's declaration lacks None
        if node is None:
            line = self._line_here()
            self._lines[torch._C._autograd._get_sequence_nr() - 1] = line
            if len(self._lines) > _MOST_LINES:
                self._lines.popitem(last=False)
        else:
            line = self._lines.get(node._sequence_nr(), "")
        operands = _tensors((args, named))
        if func._schema.is_mutable:
            operands = [x.clone() for x in operands]
        result = func(*args, **named)
        # New memory may have any values.
        if "empty" not in func.__name__:
            self._see(str(func), line, operands, _tensors(result))
        return result


def _tensors(values: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
