"""The updates of all optimizers.

One call updates the elements of one group in a region, piece by piece, or the whole parameters of a group. torch's
kernels divide the gradient by their argument ``grad_scale``, so unscaling, averaging over ranks and clipping need no
separate pass; they also store the divided gradient. Where ``skip`` is 1 nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from zeroir.ir.optimizers.catalogue import Algorithm
from zeroir.runtime.optimizers import (
    adafactor,
    adam,
    lion,
    muon,
    sgd,
    shampoo,
)
from zeroir.runtime.optimizers.operands import Operands, WholeOperands
from zeroir.runtime.optimizers.plain import MakePlain


def divided(operands: Operands) -> None:
    """Use the divided gradients themselves as directions."""
    for direction, grad in zip(operands.params, operands.grads, strict=True):
        direction.copy_(grad.div_(operands.divisor))


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementUpdate:
    """Updates elements and their states in place. ``plain`` is the reference where torch has none."""

    update: Callable[[Operands], None]
    plain: MakePlain | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeUpdate:
    """Updates whole parameters in place, with their directions as scratch memory.

    ``directions`` computes these from gradients and states; ``params`` of its operands are the directions.
    """

    step: Callable[[WholeOperands], None]
    directions: Callable[[Operands], None] = divided
    plain: MakePlain | None = None


UPDATES: Final[Mapping[Algorithm, ElementUpdate | WholeUpdate]] = {
    Algorithm.SGD: ElementUpdate(update=sgd.update),
    Algorithm.MOMENTUM: ElementUpdate(update=sgd.update),
    Algorithm.ADAM: ElementUpdate(update=adam.adam),
    Algorithm.ADAMW: ElementUpdate(update=adam.adamw),
    Algorithm.LION: ElementUpdate(update=lion.update, plain=lion.PlainLion),
    Algorithm.MUON: WholeUpdate(step=muon.step, directions=muon.directions),
    Algorithm.ADAFACTOR: WholeUpdate(step=adafactor.step),
    Algorithm.SHAMPOO: WholeUpdate(step=shampoo.step, plain=shampoo.PlainShampoo),
}


def element_update(algorithm: Algorithm) -> ElementUpdate:
    """Return the update of an optimizer that works element by element.

    Raises:
        ValueError: where it works on whole parameters.
    """
    update = UPDATES[algorithm]
    if not isinstance(update, ElementUpdate):
        raise ValueError(f"{algorithm} works on whole parameters")
    return update


def whole_update(algorithm: Algorithm) -> WholeUpdate:
    """Return the update of an optimizer that works on whole parameters.

    Raises:
        ValueError: where it works element by element.
    """
    update = UPDATES[algorithm]
    if not isinstance(update, WholeUpdate):
        raise ValueError(f"{algorithm} works element by element")
    return update
