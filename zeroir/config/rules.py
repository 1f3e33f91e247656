"""The rules by which an option has an effect beside the others."""

from __future__ import annotations

from typing import Final

from zeroir.config.field_types import STEP
from zeroir.config.offload_rules import bits_problem, offload_problem
from zeroir.config.optimizer import OptimizerOptions
from zeroir.config.options import CompileOptions
from zeroir.ir.optimizers.catalogue import OPTIONS

_GATHERED_EARLY: Final = ("prefetch", "prefetch_bytes", "prefetch_budget")
"""Options of which one sets how early parameters are gathered."""


def problem_without_effect(options: CompileOptions) -> str | None:
    """Return a sentence on the first option that has no effect beside the others; None if each has one.

    Defaults never count. Turning off a feature that is absent (``--prefetch 0``, ``--no-elide`` below stage 3) is
    no error.
    """
    return (
        _stage_problem(options)
        or _evaluation_problem(options)
        or _prefetch_problem(options)
        or _loss_scale_problem(options)
        or _micro_steps_problem(options)
        or _optimizer_problem(options)
        or offload_problem(options)
    )


def _stage_problem(options: CompileOptions) -> str | None:
    for name, row in options.rows().items():
        least = row.option.least_stage
        is_off = name == "prefetch" and options.prefetch.units == 0
        if options.stage < least and options.asks_for(name) and not is_off:
            stages = " or ".join(map(str, range(least, 4)))
            return f"{options.flag(name)} needs --stage {stages}, but the stage is {options.stage}"
    return None


def _evaluation_problem(options: CompileOptions) -> str | None:
    if options.evaluate.outputs and not options.evaluate.is_on:
        return f"{options.flag('outputs')} needs evaluations, but --no-evaluate leaves them out"
    return None


def _prefetch_problem(options: CompileOptions) -> str | None:
    early = [name for name in _GATHERED_EARLY if options.asks_for(name)]
    if len(early) > 1:
        first, second, *_ = map(options.flag, early)
        return f"{first} and {second} both set how early parameters are gathered; leave one of them out"
    return None


def _loss_scale_problem(options: CompileOptions) -> str | None:
    scale = options.loss_scale
    asked = [name for name in scale.rows() if options.asks_for(name)]
    if asked and not options.precision.is_fp16:
        return f"{options.flag(asked[0])} needs --precision fp16, but the precision is {options.precision.dtype}"
    of_dynamic = [name for name in asked if name != "loss_scale"]
    if scale.fixed is not None and of_dynamic:
        first = options.flag(of_dynamic[0])
        return f"{first} is for a dynamic loss scale, but {options.flag('loss_scale')} fixes it"
    if options.has_dynamic_loss_scale and scale.initial < scale.minimum:
        return (
            f"--minimum-loss-scale {scale.minimum:g} would raise the loss scale, which begins with "
            f"--initial-loss-scale {scale.initial:g}"
        )
    if scale.consecutive_hysteresis and scale.hysteresis == 1:
        return "--loss-scale-consecutive-hysteresis needs a --loss-scale-hysteresis above 1"
    return None


def _micro_steps_problem(options: CompileOptions) -> str | None:
    steps = options.micro_steps
    if steps.accumulate_locally and steps.count == 1:
        return "--accumulate-locally needs --micro-steps above 1, but a step has one micro-step"
    order = options.flag("order")
    if steps.interleaved == 1 and steps.order != STEP:
        return f"{order} needs --micro-steps above 1, but a step has one micro-step"
    if steps.count % steps.interleaved:
        return (
            f"{order} runs groups of {steps.interleaved} micro-batches, which do not divide the {steps.count} of "
            "--micro-steps"
        )
    if steps.accumulate_locally and steps.is_step_interleaved:
        return f"{order} adds up gradients on each rank by itself; leave --accumulate-locally out"
    if steps.accumulate_locally and options.asks_for("live_gradients"):
        return (
            f"{options.flag('live_gradients')} bounds the full gradients that wait for their reduction, but with "
            "--accumulate-locally none waits"
        )
    return None


def _optimizer_problem(options: CompileOptions) -> str | None:
    problem = _setting_problem(options.optimizer)
    if problem is not None:
        return problem
    if options.optimizer.no_decay and not any(
        each.effective_weight_decay for each in options.every_optimizer
    ):
        return "--no-decay needs a --weight-decay above 0"
    return None


def problem_of_groups(options: CompileOptions) -> str | None:
    """Return a sentence on the first group that sets what has no effect with its optimizer; None if each has one."""
    for spec, optimizer in zip(options.groups, options.every_optimizer[1:], strict=True):
        problem = _setting_problem(optimizer) or bits_problem(optimizer, (optimizer.algorithm,))
        if problem is not None:
            return f"--group {spec.text}: {problem}"
    return None


def _setting_problem(optimizer: OptimizerOptions) -> str | None:
    for name, option in OPTIONS.items():
        if optimizer.algorithm not in option.settings and optimizer.asks_for(name):
            flag = optimizer.flag(name)
            return f"{flag} needs --optimizer {option.users}, but the optimizer is {optimizer.algorithm}"
    return None
