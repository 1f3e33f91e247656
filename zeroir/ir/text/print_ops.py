"""One line of text for each op."""

from __future__ import annotations

from itertools import chain, repeat
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Mode, Op, Reduction
from zeroir.ir.text.lexical import name, number
from zeroir.ir.text.names import Names

_ATTRIBUTES_COLUMN = 72
"""Where ``stream=`` and its like begin when the line is short enough."""


def op_text(op: Op, names: Names) -> str:
    """One op as its line says it: ``!event = what``, then its attributes."""
    if isinstance(op, ops.Wait):
        return _line(None, f"wait !{name(op.waited)}", f"on={name(op.on)}")
    head, attributes = _parts(op, names)
    return _line(op.event, head, f"{attributes} stream={name(op.stream)}".lstrip())


def _line(event: str | None, head: str, attributes: str) -> str:
    if event is not None:
        head = f"!{name(event)} = {head}"
    return f"{head:<{_ATTRIBUTES_COLUMN}}  {attributes}"


def _parts(
    op: ops.Memory
    | ops.Collective
    | ops.Compute
    | ops.Cast
    | ops.Fill
    | ops.Scale
    | ops.Update
    | ops.Transfer,
    names: Names,
) -> tuple[str, str]:
    """What an op does, and its attributes but for the stream."""
    region = names.region
    match op:
        case ops.Alloc():
            return f"alloc %{name(op.buffer)}", ""
        case ops.Release():
            return f"release %{name(op.buffer)}", ""
        case (
            ops.AllGather()
            | ops.Prefetch()
            | ops.ReduceScatter()
            | ops.AllReduce()
            | ops.Broadcast()
        ):
            return _collective(op, names)
        case ops.Compute():
            return _compute(op, names), f"unit={name(op.unit)}"
        case ops.Cast():
            add = "+= " if op.mode is Mode.ACCUMULATE else ""
            return f"cast {region(op.source)} -> {add}{region(op.destination)}", ""
        case ops.Fill():
            return f"fill {region(op.destination)} = {number(op.value)}", ""
        case ops.Scale():
            return f"scale {region(op.region)} by {region(op.by)}", ""
        case ops.GradNorm():
            return f"grad_norm {_regions(op.sources, names)} -> {region(op.destination)}", ""
        case ops.CheckFinite():
            return f"check_finite {_regions(op.sources, names)} -> {region(op.destination)}", ""
        case ops.Decide():
            maximum = "" if op.max_norm is None else f" max_norm={number(op.max_norm)}"
            operands = (
                ("overflow", op.overflow),
                ("norm", op.norm),
                ("loss_scale", op.loss_scale),
                ("skip", op.skip),
            )
            head = (
                f"decide step={region(op.step)} gradient_divisor={region(op.gradient_divisor)}"
                f" divisor={op.divisor}{_operands(operands, names)}{maximum}"
            )
            return head, ""
        case ops.OptimizerStep():
            head = (
                f"optimizer_step {op.algorithm.value} param={region(op.param)}"
                f" grad={region(op.grad)} states={_regions(op.states, names)}"
                f" step={region(op.step)} lr={region(op.lr)} hyper={region(op.hyper)}"
                f" gradient_divisor={region(op.gradient_divisor)}"
                f"{_operands((('skip', op.skip),), names)}"
            )
            return head, f"group={name(op.group)}"
        case ops.UpdateScale():
            head = (
                f"update_scale {region(op.state)} skip={region(op.skip)} window={op.window}"
                f" factor={number(op.factor)} hysteresis={op.hysteresis}"
                f" minimum={number(op.minimum)}"
            )
            return head, ""
        case ops.ToHost():
            return f"to_host {region(op.source)} -> {region(op.destination)}", ""
        case ops.ToDevice():
            return f"to_device {region(op.source)} -> {region(op.destination)}", ""
        case ops.Load():
            return f"load {region(op.source)} -> {region(op.destination)}", ""
        case ops.Store():
            return f"store {region(op.source)} -> {region(op.destination)}", ""
        case _:
            assert_never(op)


def _collective(op: ops.Collective, names: Names) -> tuple[str, str]:
    match op:
        case ops.AllGather():
            keyword, own = "all_gather", ""
        case ops.Prefetch():
            keyword, own = "prefetch", ""
        case ops.ReduceScatter():
            keyword, own = "reduce_scatter", _reduction(op.reduction)
        case ops.AllReduce():
            keyword, own = "all_reduce", _reduction(op.reduction)
        case ops.Broadcast():
            keyword, own = "broadcast", f" root={op.root}"
        case _:
            assert_never(op)
    pairs = ", ".join(
        [f"{names.region(p.source)} -> {names.region(p.destination)}" for p in op.pairs]
    )
    attributes = f"comm={name(op.comm)}{own}"
    if op.wire_dtype is not None:
        attributes += f" wire={op.wire_dtype.value}"
    if op.staging is not None:
        attributes += f" staging={names.region(op.staging)}"
    return f"{keyword} {pairs}", attributes


def _reduction(reduction: Reduction) -> str:
    return "" if reduction is Reduction.SUM else f" reduction={reduction.value}"


def _compute(op: ops.Compute, names: Names) -> str:
    inputs = chain(names.inputs(op.segment), repeat(None))
    arguments = [
        names.view(argument.view, kind)
        if argument.parameter is None
        else f"{name(argument.parameter)}: {names.view(argument.view, kind)}"
        for argument, kind in zip(op.arguments, inputs, strict=False)
    ]
    destinations: list[str] = []
    outputs = chain(names.outputs(op.segment), repeat(None))
    for destination, kind in zip(op.destinations, outputs, strict=False):
        if destination is None:
            destinations.append("_")
            continue
        text = names.view(destination.view, kind)
        if destination.mode is Mode.ACCUMULATE:
            text = "+= " + text
        if destination.gradient is not None:
            text = f"grad {name(destination.gradient)}: {text}"
        destinations.append(text)
    return f"compute @{name(op.segment)}({', '.join(arguments)}) -> ({', '.join(destinations)})"


def _regions(regions: tuple[Region, ...], names: Names) -> str:
    return f"({', '.join([names.region(region) for region in regions])})"


def _operands(operands: tuple[tuple[str, Region | None], ...], names: Names) -> str:
    return "".join(
        [f" {key}={names.region(region)}" for key, region in operands if region is not None]
    )
