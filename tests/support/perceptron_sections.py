"""The ops of ``programs.mlp``: a micro-step, and the update."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.perceptron import Perceptron
from tests.support.pieces import alloc, dense, one, release
from zeroir.ir.buffers import Region, View
from zeroir.ir.eight_bit_states import blocks_numel
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import (
    Algorithm,
    Argument,
    Average,
    Cast,
    CheckFinite,
    Compute,
    Decide,
    Destination,
    Direction,
    GradNorm,
    Mode,
    Op,
    OptimizerStep,
    UpdateScale,
)
from zeroir.ir.optimizers.forms import ABSMAX, CODES
from zeroir.ir.own_coordinates import own_numel
from zeroir.ir.program import Flat


def micro_body(made: Perceptron, flats: tuple[Flat, ...]) -> list[Op]:
    n, d, f = made.batch, made.dim, made.features
    homes = {
        name: (home, slot)
        for home in flats
        for slot in home.slots
        for name in (slot.name, *slot.aliases)
    }

    def act(name: str) -> View:
        return dense(name, (n, d))

    def argument(name: str) -> Argument:
        home, slot = homes[name]
        return Argument(view=dense(f"{home.name}.param", slot.shape, slot.offset), parameter=name)

    def gradient(name: str, mode: Mode = Mode.WRITE) -> Destination:
        home, slot = homes[name]
        return Destination(
            view=dense(f"{home.name}.grad", slot.shape, slot.offset), mode=mode, gradient=name
        )

    def call(
        segment: str,
        unit: str,
        arguments: Iterable[View | Argument],
        *destinations: View | Destination,
    ) -> Op:
        return Compute(
            segment=segment,
            unit=unit,
            arguments=tuple(a if isinstance(a, Argument) else Argument(view=a) for a in arguments),
            destinations=tuple(
                v if isinstance(v, Destination) else Destination(view=v) for v in destinations
            ),
            stream=COMPUTE,
        )

    x, loss = dense("input.x", (n, f)), dense("loss", ())
    ops: list[Op] = [
        alloc("h.0"),
        call("pre.forward", "root.pre", [x, argument("pre.weight")], act("h.0")),
    ]
    for i in range(made.blocks):
        unit = f"blocks.{i}"
        scale = [argument(f"{unit}.scale")] if made.keep_fp32 else []
        ops += [
            alloc(f"h.{i + 1}"),
            alloc(f"{unit}.relu"),
            call(
                "block.forward",
                unit,
                [act(f"h.{i}"), argument(f"{unit}.weight"), argument(f"{unit}.bias"), *scale],
                act(f"h.{i + 1}"),
                act(f"{unit}.relu"),
            ),
        ]
    last = f"h.{made.blocks}"
    ops += [
        alloc("difference"),
        call(
            "post.forward",
            "root.post",
            [act(last), x, argument("post.weight")],
            loss,
            dense("difference", (n, f)),
        ),
        alloc(f"d.{made.blocks}"),
        call(
            "post.backward",
            "root.post",
            [
                dense("loss_scale", ()),
                dense("difference", (n, f)),
                act(last),
                argument("post.weight"),
            ],
            act(f"d.{made.blocks}"),
            gradient("post.weight"),
        ),
        release("difference"),
        release(last),
    ]
    for i in reversed(range(made.blocks)):
        unit = f"blocks.{i}"
        scale_name = [f"{unit}.scale"] if made.keep_fp32 else []
        names = [f"{unit}.weight", f"{unit}.bias", *scale_name]
        ops += [
            alloc(f"d.{i}"),
            call(
                "block.backward",
                unit,
                [
                    act(f"d.{i + 1}"),
                    act(f"{unit}.relu"),
                    act(f"h.{i}"),
                    argument(f"{unit}.weight"),
                    *map(argument, scale_name),
                ],
                act(f"d.{i}"),
                *map(gradient, names),
            ),
            release(f"d.{i + 1}"),
            release(f"{unit}.relu"),
            release(f"h.{i}"),
        ]
    mode = Mode.ACCUMULATE if made.tied else Mode.WRITE
    ops += [
        call("pre.backward", "root.pre", [act("d.0"), x], gradient("pre.weight", mode)),
        release("d.0"),
    ]
    return ops


def update_body(made: Perceptron, flats: tuple[Flat, ...]) -> list[Op]:
    gradients = tuple(
        Region(buffer=f"{f.name}.grad", offset=0, numel=f.padded_numel) for f in flats
    )
    ops: list[Op] = []
    if made.has_scaling:
        ops.append(CheckFinite(sources=gradients, destination=one("overflow"), stream=COMPUTE))
    if made.clip is not None:
        ops.append(GradNorm(sources=gradients, destination=one("norm"), stream=COMPUTE))
    skip = one("skip") if made.has_scaling else None
    ops.append(
        Decide(
            step=one("step"),
            gradient_divisor=one("gradient_divisor"),
            divisor=1,
            overflow=one("overflow") if made.has_scaling else None,
            norm=one("norm") if made.clip is not None else None,
            loss_scale=one("loss_scale") if made.has_scaling else None,
            skip=skip,
            max_norm=made.clip,
            stream=COMPUTE,
        )
    )
    for home, gradient in zip(flats, gradients, strict=True):
        is_low = home.dtype.is_low_precision
        grad32 = Region(buffer=f"{home.name}.grad32", offset=0, numel=home.padded_numel)
        param = Region(buffer=f"{home.name}.param", offset=0, numel=home.padded_numel)
        master = Region(buffer=f"{home.name}.master", offset=0, numel=home.padded_numel)
        if is_low:
            ops += [
                alloc(grad32.buffer),
                Cast(source=gradient, destination=grad32, stream=COMPUTE),
            ]
        complete = grad32 if is_low else gradient
        names = made.algorithm.state_names
        states = tuple(
            Region(
                buffer=f"{home.name}.{CODES[state] if made.has_codes else state}",
                offset=0,
                numel=home.padded_numel,
            )
            for state in names
        )
        scales = tuple(
            Region(
                buffer=f"{home.name}.{ABSMAX[state]}",
                offset=0,
                numel=blocks_numel(home.padded_numel),
            )
            for state in (names if made.has_codes else ())
        )
        direction = Region(buffer=f"{home.name}.direction", offset=0, numel=home.padded_numel)
        factors = Region(buffer=f"{home.name}.factors", offset=0, numel=own_numel("factors", home))
        if made.algorithm.direction_dtype is not None:
            ops += [
                alloc(direction.buffer),
                Direction(
                    algorithm=made.algorithm,
                    grad=complete,
                    states=states,
                    direction=direction,
                    step=one("step"),
                    lr=one("lr"),
                    hyper=made.hyper,
                    gradient_divisor=one("gradient_divisor"),
                    skip=skip,
                    stream=COMPUTE,
                ),
            ]
            complete, states = direction, ()
        ops.append(
            OptimizerStep(
                algorithm=made.algorithm,
                param=master if is_low else param,
                grad=complete,
                states=states,
                step=one("step"),
                lr=one("lr"),
                hyper=made.hyper,
                gradient_divisor=one("gradient_divisor"),
                skip=skip,
                factors=factors if made.algorithm is Algorithm.ADAFACTOR else None,
                scales=scales,
                stream=COMPUTE,
            )
        )
        if made.algorithm.direction_dtype is not None:
            ops.append(release(direction.buffer))
        if made.ema is not None:
            mean = Region(buffer=f"{home.name}.ema", offset=0, numel=home.padded_numel)
            trained = master if is_low else param
            ops.append(
                Average(param=trained, average=mean, decay=made.ema, skip=skip, stream=COMPUTE)
            )
        if is_low:
            ops.append(Cast(source=master, destination=param, stream=COMPUTE))
        if is_low:
            ops.append(release(grad32.buffer))
    if made.has_scaling:
        state = Region(buffer="loss_scale", offset=0, numel=3)
        ops.append(UpdateScale(state=state, skip=one("skip"), stream=COMPUTE))
    return ops
