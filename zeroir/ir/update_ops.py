"""The ops of the kind ``Update``, of which the optimizer's step consists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zeroir.ir.buffers import Region
from zeroir.ir.op_fields import (
    Accumulated,
    Attribute,
    Read,
    Result,
    Signalled,
    StreamName,
    Written,
)
from zeroir.ir.operation import Mode, Operation, Refill
from zeroir.ir.optimizers.catalogue import Algorithm
from zeroir.ir.optimizers.forms import StateForm


class Update(Operation):
    """The kind of ops of the optimizer's step: statistics, the decision, and the changes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNorm(Update):
    """Write the FP32 sum of squares of this rank's sources, added in the order given, to a one-element f32 region.

    With the mode ``accumulate`` the sum starts with the region's value, so several consecutive ops compute the same
    bits as one op with all sources. It is a partial sum until an all_reduce over every axis that shards the sources
    makes it global.
    """

    syntax = "({sources}) -> {mode}{destination}"

    sources: tuple[Read[Region], ...]
    destination: Result[Region]
    stream: StreamName[str]
    mode: Attribute[Mode] = Mode.WRITE
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinite(Update):
    """Write 1 to a one-element f32 region if any element of this rank's sources is infinite or NaN, else 0.

    With the mode ``accumulate`` an existing 1 is kept. It is a partial answer until an all_reduce makes it global.
    """

    syntax = "({sources}) -> {mode}{destination}"

    sources: tuple[Read[Region], ...]
    destination: Result[Region]
    stream: StreamName[str]
    mode: Attribute[Mode] = Mode.WRITE
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide(Update):
    """Take the one decision of an update, alike on every rank, and advance the step count.

    ``overflow`` (f32[1], from check_finite) and ``norm`` (f32[1], a sum of squares of scaled, summed gradients) are
    global by now, or None if the program does not need them. With S = ``divisor`` × ``weight`` × the loss scale
    (``loss_scale[0]``; either is 1 when None):

    * ``skip`` (f32[1], with ``overflow`` or ``weight`` alone): 1 when overflow > 0 or the weight is 0, else 0;
    * ``gradient_divisor`` (f32[1]): S / c, with c = min(1, max_norm / (sqrt(norm) / S + 1e-6)) when ``max_norm`` is
      given, as torch.nn.utils.clip_grad_norm_ has it, else 1;
    * ``step`` (f32[1]): + 1 − skip, and so is each of ``counts`` (f32[1]), the step counts of parameters that were not
      trained from the first step on.

    ``weight`` (f32[1]) is the sum of the weights of the step's micro-batches. ``divisor`` is the size of the mesh axes
    that it is not summed over: the world size if each rank counts its own micro-steps, 1 if the weights of all
    ranks are summed. Without ``weight``, ``divisor`` is the world size × the number of micro-steps.

    ``guess`` (f32[1]) is the divisor that speculative steps took. ``redo`` (f32[1]) is then 1 if that was wrong,
    because ``gradient_divisor`` is another number or ``skip`` is 1, else 0.
    """

    syntax = (
        "step={step} [counts=({counts})] gradient_divisor={gradient_divisor} divisor={divisor} [overflow={overflow}]"
        " [norm={norm}] [loss_scale={loss_scale}] [skip={skip}] [max_norm={max_norm}] [weight={weight}] [guess={guess}]"
        " [redo={redo}]"
    )

    step: Accumulated[Region]
    gradient_divisor: Written[Region]
    divisor: Attribute[int]
    stream: StreamName[str]
    overflow: Read[Region] | None = None
    norm: Read[Region] | None = None
    loss_scale: Read[Region] | None = None
    skip: Written[Region] | None = None
    max_norm: Attribute[float] | None = None
    weight: Read[Region] | None = None
    guess: Read[Region] | None = None
    redo: Written[Region] | None = None
    counts: tuple[Accumulated[Region], ...] = ()
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess(Update):
    """Write the results that ``decide`` has where it neither clips nor skips.

    ``gradient_divisor`` (f32[1]) is S of ``Decide``, by the same operations, so it is bitwise equal; ``divisor``,
    ``loss_scale`` and ``weight`` are those of ``Decide``. ``next_step`` (f32[1]) is ``step`` + 1.
    """

    syntax = (
        "step={step} next_step={next_step} gradient_divisor={gradient_divisor} divisor={divisor}"
        " [loss_scale={loss_scale}] [weight={weight}]"
    )

    step: Read[Region]
    next_step: Written[Region]
    gradient_divisor: Written[Region]
    divisor: Attribute[int]
    stream: StreamName[str]
    loss_scale: Read[Region] | None = None
    weight: Read[Region] | None = None
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The learning rate and the hyper-parameters of one optimizer group."""

    syntax: ClassVar[str] = "{group} lr={lr} hyper={hyper}"

    group: Attribute[str]
    lr: Read[Region]
    hyper: Read[Region]


class GroupedUpdate(Update):
    """The kind of updates that read the settings of optimizer groups."""

    __slots__ = ()

    lr: Read[Region]
    hyper: Read[Region]
    group: Attribute[str]
    others: tuple[GroupSettings, ...]

    @property
    def settings(self) -> tuple[GroupSettings, ...]:
        """The settings of every group that the op names."""
        own = GroupSettings(group=self.group, lr=self.lr, hyper=self.hyper)
        return (own, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction(GroupedUpdate):
    """Compute the direction of each element from its ``grad`` / gradient_divisor, and update its ``states``.

    It is the element-wise half of the step of an optimizer that works on whole parameters; ``optimizer_step`` is the
    other half. ``grad`` and ``states`` are f32, ``direction`` has ``algorithm.direction_dtype``, all with the same
    numel.

    The direction is the gradient itself, unless the optimizer keeps states of elements, such as a momentum.

    ``grad`` is overwritten. Where ``skip`` is 1 the states are unchanged, and the direction is never applied. Settings
    and the other fields are those of ``OptimizerStep``.
    """

    syntax = (
        "{algorithm} grad={grad} states=({states}) -> {direction} step={step} lr={lr} hyper={hyper}"
        " gradient_divisor={gradient_divisor} [skip={skip}] | group={group} [others=({others})]"
    )
    participle = "updated"
    same_elements = ("grad", "states", "direction")

    algorithm: Attribute[Algorithm]
    grad: Accumulated[Region]
    states: tuple[Accumulated[Region], ...]
    direction: Written[Region]
    step: Read[Region]
    lr: Read[Region]
    hyper: Read[Region]
    gradient_divisor: Read[Region]
    stream: StreamName[str]
    skip: Read[Region] | None = None
    group: Attribute[str] = "default"
    others: tuple[GroupSettings, ...] = ()
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStep(GroupedUpdate):
    """The fields of every op that changes parameters by a gradient."""

    algorithm: Attribute[Algorithm]
    param: Accumulated[Region]
    grad: Read[Region]
    states: tuple[Accumulated[Region], ...]
    step: Read[Region]
    lr: Read[Region]
    hyper: Read[Region]
    gradient_divisor: Read[Region]
    stream: StreamName[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep(ParameterStep):
    """Update ``param`` (and ``states``) in place with ``grad`` / gradient_divisor, all f32 with the same numel.

    ``grad`` is overwritten: torch's fused kernels store the divided gradient there, and nothing may read it afterwards.

    ``states`` are in the order of ``algorithm.state_names``. ``lr`` is a one-element f64 region on the device,
    ``hyper`` an f64 region on the host with the values of ``algorithm.hyper_names``. Where ``skip`` is 1 nothing
    changes. ``step`` is the count, or one of the counts, that ``decide`` advanced.

    ``lr`` and ``hyper`` are those of ``group``, and ``others`` those of other groups. Each element is updated with the
    settings of the group whose intervals (``Program.groups``) contain it; without groups, all with the first. An
    element in no group, such as padding between parameters, may stay unchanged. Groups, parameters and padding are
    found by their places in the buffer at rest, so ``param`` must have the elements of its place at rest, if there is
    one.

    With ``scales`` the states are stored in 8 bits (``zeroir/ir/eight_bit_states.py``): ``states`` are u8 codes, and
    ``scales``, in the same order, the f32 scales of their blocks of 256 elements. Each state is widened to FP32 for the
    update, which uses the new FP32 values, and these are rounded to new codes and scales.

    With an optimizer that works on whole parameters (``algorithm.direction_dtype``) ``grad`` are the directions of the
    whole flat, although ``param`` may be a slice; ``states`` belong to ``direction``, so there are none here. Each rank
    computes the steps of the parameters that overlap its slice. ``factors`` are the optimizer's own state of whole
    parameters, equal on all ranks or sharded. ``whole`` is the other input of whole parameters that the step reads in
    addition to directions: the parameters before the step, unless ``param`` has all of them, or a sharded state, unless
    ``factors`` has all of it.
    """

    syntax = (
        "{algorithm} param={param} grad={grad} states=({states}) [scales=({scales})] step={step} lr={lr}"
        " hyper={hyper} gradient_divisor={gradient_divisor} [skip={skip}] [whole={whole}] [factors={factors}]"
        " | group={group} [others=({others})]"
    )
    participle = "updated"
    same_elements = ("param", "grad", "states")

    grad: Accumulated[Region]
    skip: Read[Region] | None = None
    group: Attribute[str] = "default"
    others: tuple[GroupSettings, ...] = ()
    whole: Read[Region] | None = None
    factors: Accumulated[Region] | None = None
    scales: tuple[Accumulated[Region], ...] = ()
    event: Signalled[str] | None = None

    @property
    def form(self) -> StateForm:
        """The form in which the states are stored."""
        return StateForm.EIGHT_BITS if self.scales else StateForm.FP32

    @property
    def state_quantities(self) -> tuple[str, ...]:
        """The quantities in ``states``, in order: the states of the algorithm, or their codes."""
        names = () if self.algorithm.direction_dtype is not None else self.algorithm.state_names
        return tuple(self.form.numbers(name)[0].quantity for name in names)

    @property
    def scale_quantities(self) -> tuple[str, ...]:
        """The quantities in ``scales``, in order."""
        return tuple(
            numbers.quantity
            for name in self.algorithm.state_names
            for numbers in self.form.numbers(name)[1:]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep(ParameterStep):
    """Update ``param`` and ``states`` with guessed scalars, and copy their old elements to ``kept``.

    It is an ``optimizer_step`` whose ``step`` and ``gradient_divisor`` were written by a ``guess``, and which never
    skips. ``kept`` are regions like ``param`` and ``states``, in this order. ``grad`` is not changed; it has any
    floating-point dtype, and is widened to FP32 chunk by chunk. ``rounded`` gets the updated parameters, rounded to its
    dtype. Only optimizers that work element by element, with FP32 states, have such steps.
    """

    syntax = (
        "{algorithm} param={param} grad={grad} states=({states}) kept=({kept}) [rounded={rounded}] step={step} lr={lr}"
        " hyper={hyper} gradient_divisor={gradient_divisor} | group={group} [others=({others})]"
    )
    participle = "updated"
    same_elements = ("param", "grad", "states", "kept", "rounded")

    kept: tuple[Written[Region], ...]
    rounded: Written[Region] | None = None
    group: Attribute[str] = "default"
    others: tuple[GroupSettings, ...] = ()
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStep(ParameterStep):
    """Make a speculative step final.

    Where ``redo`` is 0 the guess was right, and ``param`` and ``states`` are unchanged. Otherwise they are restored
    from ``kept``, and unless ``skip`` is 1 the step is repeated with the scalars of the decision; ``rounded`` follows
    ``param``. These and the other fields are those of the ``speculative_step``; ``grad`` is not changed.
    """

    syntax = (
        "{algorithm} param={param} grad={grad} states=({states}) kept=({kept}) [rounded={rounded}] redo={redo}"
        " step={step} lr={lr} hyper={hyper} gradient_divisor={gradient_divisor} [skip={skip}] | group={group}"
        " [others=({others})]"
    )
    participle = "committed"
    same_elements = ("param", "grad", "states", "kept", "rounded")

    kept: tuple[Read[Region], ...]
    redo: Read[Region]
    skip: Read[Region] | None = None
    rounded: Accumulated[Region] | None = None
    group: Attribute[str] = "default"
    others: tuple[GroupSettings, ...] = ()
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(Update):
    """Advance the moving average of parameters by one step: ``average`` × decay + ``param`` × (1 − decay).

    Both are f32 with the same numel, and ``param`` are the parameters after this step's ``optimizer_step``. Each of the
    three operations rounds separately, as in ``torch.optim.swa_utils.get_ema_avg_fn``. Where ``skip`` is 1 nothing
    changes.
    """

    syntax = "{param} -> {average} [skip={skip}] | decay={decay}"
    participle = "averaged"
    same_elements = ("param", "average")

    param: Read[Region]
    average: Accumulated[Region]
    decay: Attribute[float]
    stream: StreamName[str]
    skip: Read[Region] | None = None
    event: Signalled[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateScale(Update):
    """Dynamic loss scaling: ``state`` is f32[3] = (scale, steps since the last change, hysteresis left).

    On overflow (skip = 1): with hysteresis left ≤ 1 the scale becomes max(scale / factor, minimum), else the
    hysteresis drops by one; the step counter restarts. Otherwise after ``window`` steps without overflow the scale
    grows by ``factor`` and the hysteresis is restored, earlier where ``refill`` says so. These are DeepSpeed's
    semantics. Where ``weight`` (f32[1]) is given and 0, the step was skipped because it has no data: nothing changes.
    """

    syntax = (
        "{state} skip={skip} window={window} factor={factor} hysteresis={hysteresis} minimum={minimum}"
        " [refill={refill}] [weight={weight}]"
    )

    state: Accumulated[Region]
    skip: Read[Region]
    stream: StreamName[str]
    window: Attribute[int] = 1000
    factor: Attribute[float] = 2.0
    hysteresis: Attribute[int] = 2
    minimum: Attribute[float] = 1.0
    refill: Attribute[Refill] = Refill.WINDOW
    weight: Read[Region] | None = None
    event: Signalled[str] | None = None


UpdateOp = (
    GradNorm
    | CheckFinite
    | Guess
    | Decide
    | Direction
    | OptimizerStep
    | SpeculativeStep
    | CommitStep
    | Average
    | UpdateScale
)

StepOp = Direction | OptimizerStep | SpeculativeStep | CommitStep
"""The ops that read a gradient and the settings of groups."""
