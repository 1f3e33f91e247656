"""The micro-batches of a step, and what is computed twice."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from zeroir.config.field_types import LAYER, STEP, Names, Order
from zeroir.config.searched import Searched
from zeroir.config.table import Option, OptionObject
from zeroir.ir.limits import MOST_COUNT

_GROUP = "Steps"

ELEMENTS: Final = "elements"
BATCHES: Final = "batches"


class MicroSteps(OptionObject):
    """The micro-batches over which a gradient accumulates, and their order.

    ``order`` is ``step``, ``layer``, or ``layer=G`` for groups of G micro-batches that run unit by unit. With
    ``accumulate_locally`` each rank adds up whole gradients in FP32. ``mean_over`` says what the loss and the gradient
    of a step are the mean over: ``elements``, such as labels, or ``batches``.
    """

    count: Annotated[
        int,
        Field(ge=1, le=MOST_COUNT),
        Option(
            name="micro_steps",
            group=_GROUP,
            help="Micro-steps over which a gradient accumulates. With more than 1 a program is compiled for any number "
            "of them.",
            is_of_run=True,
        ),
    ] = 1
    order: Annotated[
        Order,
        Option(
            group=_GROUP,
            help="What runs next: each micro-batch through all units (step), or each unit on all micro-batches of a "
            "step (layer), so that its parameters are gathered or copied to the device once for them, and activations "
            "of all are kept. layer=4: in groups of 4 micro-batches.",
            is_of_run=True,
            searched=Searched(
                axis=7,
                # The program's length grows with the groups.
                values=(STEP, f"{LAYER}=2", f"{LAYER}=4", f"{LAYER}=8"),
                fast=-1,
                lean=0,
                off=STEP,
            ),
        ),
    ] = STEP
    accumulate_locally: Annotated[
        bool,
        Option(
            group=_GROUP,
            help="Add whole FP32 gradients on each rank and reduce them once, in the last micro-step: less traffic, "
            "more memory (stages 2, 3 with --micro-steps above 1).",
            least_stage=2,
        ),
    ] = False
    mean_over: Annotated[
        Literal["elements", "batches"] | None,
        Option(
            group=_GROUP,
            help="What counts alike in the mean over a step's micro-batches and ranks: each element that the loss is "
            "the mean over, such as a label that is not ignored, as if one process had them all (elements), or each "
            "batch (batches). [default: elements where batches may have different numbers of them, else batches]",
        ),
    ] = None

    @property
    def interleaved(self) -> int:
        """The number of micro-batches that run unit by unit; 1 where each has a micro-step of its own."""
        if self.order == STEP:
            return 1
        group = self.order.partition("=")[2]
        return int(group) if group else self.count

    @property
    def is_step_interleaved(self) -> bool:
        """Whether all micro-batches of a step run unit by unit."""
        return self.interleaved == self.count > 1


class Evaluate(OptionObject):
    """Evaluations between training steps: whether the program has them, and what they yield beside the loss."""

    is_on: Annotated[
        bool,
        Option(
            name="evaluate",
            group=_GROUP,
            help="Capture the model under eval(), too: the program can evaluate between training steps.",
        ),
    ] = True
    outputs: Annotated[
        Names,
        Option(
            group=_GROUP,
            help="What an evaluation yields beside the loss: names in the object or dict that forward, or the loss "
            "function, returns, separated by commas. [default: the second part of a pair (loss, outputs)]",
        ),
    ] = ()


class Recompute(OptionObject):
    """What the backward computes once more instead of keeping it.

    ``units`` are patterns of names: their forward is computed again before their backward (activation checkpointing);
    ``*`` means all repeated units. With ``select_saved`` cheap values are computed again wherever that saves bytes.
    """

    units: Annotated[
        Names,
        Option(
            name="recompute",
            group="Memory",
            help="Units whose forward is recomputed before their backward instead of saving its values (activation "
            "checkpointing): names or patterns; * means all repeated units.",
            searched=Searched(axis=2),
        ),
    ] = ()
    select_saved: Annotated[
        bool,
        Option(
            group="Memory",
            help="Save the fewest bytes for the backward, and recompute cheap values there.",
            searched=Searched(axis=1, values=(False, True)),
        ),
    ] = True
