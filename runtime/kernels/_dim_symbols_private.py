"""Torch's symbols for dims while a segment is compiled, and what the compiler assumes of them.

Like ``_inductor_private``, this module uses torch's private interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from zeroir.errors import InternalError
from zeroir.ir.sizes import Dim, Size


class DimSymbols:
    """One symbol for each dim.

    Torch takes sizes of 0 and 1 for constants, and symbols are larger. The code for these computes the same elements of
    the same places where a size is 1; ``compile_library`` lets torch answer as if none were (size-oblivious mode).
    """

    def __init__(self, dims: Sequence[Dim]) -> None:
        self.shape_env = ShapeEnv()
        self._values: dict[str, int | torch.SymInt] = {}
        self._dims: dict[sympy.Symbol, Dim] = {}
        for index, dim in enumerate(dims):
            source = ConstantSource(dim.name)
            # Different ones, because the answers to questions would otherwise be those of equal dims.
            hint = min(max((_least(dim) + dim.maximum) // 2, 2 + index), dim.maximum)
            symbol = self.shape_env.create_symbol(
                hint,
                source=source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=StrictMinMaxConstraint(
                    vr=ValueRanges(_least(dim), dim.maximum), warn_only=False
                ),
            )
            self._values[dim.name] = self.shape_env.create_symintnode(
                symbol, hint=hint, source=source
            )
            self._dims[symbol] = dim

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes as torch computes with them."""
        return [size.at(self._values) if isinstance(size, Size) else size for size in sizes]  # type: ignore[arg-type]

    def smallest_values(self) -> dict[str, int]:
        """Return the dims that must have at least another value than their smallest, with that value.

        Raises:
            InternalError: if the compiler assumes something that fails for larger values, too.
        """
        smallest: dict[Dim, int] = {}
        for guard in self.shape_env.guards:
            if self._holds(guard.expr, smallest):
                continue
            for symbol, dim in self._dims.items():
                if symbol in guard.expr.free_symbols:
                    value = self._smallest_for(guard.expr, dim, smallest)
                    if value is not None:
                        smallest[dim] = value
                        break
            else:
                named = {symbol: sympy.Symbol(dim.name) for symbol, dim in self._dims.items()}
                raise InternalError(
                    f"Inductor makes code that is right only where {guard.expr.xreplace(named)}."
                )
        return {dim.name: value for dim, value in smallest.items()}

    def _smallest_for(
        self, guard: sympy.Basic, dim: Dim, smallest: Mapping[Dim, int]
    ) -> int | None:
        """Return the smallest value of a dim from which on a guard holds; None where there is none."""
        low, high = smallest.get(dim, _least(dim)), dim.maximum
        if not self._holds(guard, {**smallest, dim: high}):
            return None
        while low < high:
            middle = (low + high) // 2
            if self._holds(guard, {**smallest, dim: middle}):
                high = middle
            else:
                low = middle + 1
        return low

    def _holds(self, guard: sympy.Basic, smallest: Mapping[Dim, int]) -> bool:
        """Return whether a guard holds for all values of dims from these smallest ones on."""
        ranges = tuple(
            (symbol, ValueRanges(smallest.get(dim, _least(dim)), dim.maximum))
            for symbol, dim in self._dims.items()
        )
        answer = self.shape_env._maybe_evaluate_static(guard, axioms=(), var_to_range=ranges)
        return answer is sympy.true or answer is True


def _least(dim: Dim) -> int:
    return min(max(dim.minimum, 2), dim.maximum)
