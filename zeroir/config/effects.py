"""The rules by which an option has an effect beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zeroir.config.field_types import STEP
from zeroir.config.offload_rules import offload_problem
from zeroir.config.texts import text_of
from zeroir.ir.optimizers.catalogue import OPTIONS

if TYPE_CHECKING:
    from zeroir.config.options import CompileOptions

_LEAST_STAGES: Final = {
    "accumulate_locally": 2,
    "bucket_gathers": 1,
    "live_gradients": 2,
    "prefetch": 3,
    "prefetch_bytes": 3,
    "prefetch_budget": 3,
    "unshard": 3,
    "unshard_bytes": 3,
}
"""The lowest stage at which each of these options has an effect."""

_GATHERED_EARLY: Final = ("prefetch", "prefetch_bytes", "prefetch_budget")
"""Options of which one sets how early parameters are gathered."""

_DYNAMIC_LOSS_SCALE: Final = (
    "initial_loss_scale",
    "loss_scale_window",
    "loss_scale_factor",
    "loss_scale_hysteresis",
    "loss_scale_consecutive_hysteresis",
    "minimum_loss_scale",
)


def first_without_effect(options: CompileOptions) -> str | None:
    """A sentence on the first option that has no effect beside the others; None if each has one.

    Defaults never count. Turning off a feature that is absent (``--prefetch 0``, ``--no-elide`` below stage 3) is
    no error.
    """
    for name, least in _LEAST_STAGES.items():
        is_off = name == "prefetch" and options.prefetch == 0
        if options.stage < least and _asks_for(options, name) and not is_off:
            stages = " or ".join(map(str, range(least, 4)))
            return (
                f"{_flag(options, name)} needs --stage {stages}, but the stage is {options.stage}"
            )
    if options.outputs and not options.evaluate:
        return f"{_flag(options, 'outputs')} needs evaluations, but --no-evaluate leaves them out"
    early = [name for name in _GATHERED_EARLY if _asks_for(options, name)]
    if len(early) > 1:
        first, second, *_ = (_flag(options, name) for name in early)
        return f"{first} and {second} both set how early parameters are gathered; leave one of them out"
    for name in ("loss_scale", *_DYNAMIC_LOSS_SCALE):
        if options.precision != "fp16" and _asks_for(options, name):
            return f"{_flag(options, name)} needs --precision fp16, but the precision is {options.precision}"
    for name in _DYNAMIC_LOSS_SCALE:
        if options.loss_scale is not None and _asks_for(options, name):
            return f"{_flag(options, name)} is for a dynamic loss scale, but {_flag(options, 'loss_scale')} fixes it"
    if options.has_dynamic_loss_scale and options.initial_loss_scale < options.minimum_loss_scale:
        return (
            f"--minimum-loss-scale {options.minimum_loss_scale:g} would raise the loss scale, which begins with "
            f"--initial-loss-scale {options.initial_loss_scale:g}"
        )
    if options.loss_scale_consecutive_hysteresis and options.loss_scale_hysteresis == 1:
        return "--loss-scale-consecutive-hysteresis needs a --loss-scale-hysteresis above 1"
    if options.accumulate_locally and options.micro_steps == 1:
        return "--accumulate-locally needs --micro-steps above 1, but a step has one micro-step"
    if options.interleaved == 1 and options.order != STEP:
        return (
            f"{_flag(options, 'order')} needs --micro-steps above 1, but a step has one micro-step"
        )
    if options.micro_steps % options.interleaved:
        return (
            f"{_flag(options, 'order')} runs groups of {options.interleaved} micro-batches, which do not divide the "
            f"{options.micro_steps} of --micro-steps"
        )
    if options.accumulate_locally and options.is_step_interleaved:
        flag = _flag(options, "order")
        return f"{flag} adds up gradients on each rank by itself; leave --accumulate-locally out"
    if options.accumulate_locally and _asks_for(options, "live_gradients"):
        return (
            f"{_flag(options, 'live_gradients')} bounds the full gradients that wait for their reduction, but with "
            "--accumulate-locally none waits"
        )
    for name, option in OPTIONS.items():
        if options.optimizer not in option.settings and _asks_for(options, name):
            return f"{_flag(options, name)} needs --optimizer {option.users}, but the optimizer is {options.optimizer}"
    decays = (o.effective_weight_decay for o in (options, *map(options.of_group, options.groups)))
    if options.no_decay and not any(decays):
        return "--no-decay needs a --weight-decay above 0"
    return offload_problem(options)


def _asks_for(options: CompileOptions, name: str) -> bool:
    value = getattr(options, name)
    return bool(value != type(options).model_fields[name].default)


def _flag(options: CompileOptions, name: str) -> str:
    return f"--{name.replace('_', '-')} {text_of(getattr(options, name))}"
