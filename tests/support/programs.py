"""Small logical programs made by hand, without tracing and without torch.

``mlp`` is a residual perceptron with a reconstruction loss::

    root.pre    h = x @ W0.T
    blocks.i    h = relu((h * s) @ W.T + b) + h        (s only with keep_fp32)
    root.post   loss = mean((h @ V.T - x) ** 2)        (V is W0.T itself when tied)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tests.support.perceptron import Perceptron
from tests.support.perceptron_sections import micro_body, update_body
from zeroir.frontend.lowering.accumulate import accumulate
from zeroir.frontend.lowering.micro_batch_weights import add_micro_batch_weights
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Algorithm
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    UPDATE,
    Holding,
    InputBinding,
    OptimizerGroup,
    Program,
    ScalarBinding,
    Section,
    State,
)
from zeroir.ir.reports import Quantity, ReportBinding
from zeroir.workspace.segments import corrected

PRECISIONS = {"fp32": DType.F32, "fp16": DType.F16, "bf16": DType.BF16}

HYPER = {
    "sgd": (0.0, 0.0, 0.0, 0.01),
    "momentum": (0.9, 0.0, 0.0, 0.01),
    "adam": (0.9, 0.999, 1e-8, 0.01),
    "adamw": (0.9, 0.999, 1e-8, 0.01),
    "lion": (0.9, 0.99, 0.01),
    "muon": (0.95, 1.0, 0.1, 1e-7, 5.0, 3.4445, -4.775, 2.0315, 0.0),
    "adafactor": (-0.8, 2.0**-23, 1e-3, 1.0, 0.01),
}


@cache
def mlp(
    blocks: int = 3,
    dim: int = 8,
    features: int = 6,
    batch: int = 4,
    precision: str = "fp32",
    optimizer: str = "adamw",
    micro_steps: int = 1,
    clip: float | None = None,
    tied: bool = False,
    keep_fp32: bool = False,
    ema: float | None = None,
    is_weighted: bool = False,
    has_codes: bool = False,
) -> Program:
    """The logical program of the module's docstring; x is f32[batch, features] on every rank.

    With ``has_codes`` the optimizer's states have 8 bits.
    """
    if is_weighted or micro_steps > 1:
        program = mlp(
            blocks=blocks,
            dim=dim,
            features=features,
            batch=batch,
            precision=precision,
            optimizer=optimizer,
            clip=clip,
            tied=tied,
            keep_fp32=keep_fp32,
            ema=ema,
            has_codes=has_codes,
        )
        program = add_micro_batch_weights(program) if is_weighted else program
        program = accumulate(program) if micro_steps > 1 else program
        options = {**program.options.texts, "micro_steps": str(micro_steps)}
        return corrected(replace(program, options=WrittenOptions.of(options)))
    made = Perceptron(
        blocks=blocks,
        dim=dim,
        features=features,
        batch=batch,
        dtype=PRECISIONS[precision],
        algorithm=Algorithm(optimizer),
        clip=clip,
        tied=tied,
        keep_fp32=keep_fp32,
        has_scaling=precision == "fp16",
        ema=ema,
        has_codes=has_codes,
    )
    flats = made.flats()
    complete = State(
        holdings=tuple(
            Holding(
                region=Region(buffer=f"{home.name}.grad", offset=0, numel=home.padded_numel),
                content=FlatContent(quantity="grad", flat=home.name, micro=Micro.ALL),
            )
            for home in flats
        )
    )
    body = tuple(micro_body(made, flats))
    sections = [
        Section(name=LAST_MICRO_STEP, body=body, exit=complete),
        Section(name=UPDATE, entry=complete, body=tuple(update_body(made, flats))),
    ]
    scalars = [
        ScalarBinding(buffer="loss", values=(0.0,)),
        ScalarBinding(
            buffer="loss_scale",
            values=(2.0**10, 0.0, 2.0) if precision == "fp16" else (1.0, 0.0, 0.0),
        ),
        ScalarBinding(buffer="step", values=(0.0,)),
        ScalarBinding(buffer="lr", values=(0.01,)),
        ScalarBinding(
            buffer="hyper",
            values=HYPER[optimizer],
        ),
        ScalarBinding(buffer="gradient_divisor", values=(1.0,)),
    ]
    extra = [
        name
        for name, is_there in (
            ("overflow", made.has_scaling),
            ("skip", made.has_scaling),
            ("norm", clip is not None),
        )
        if is_there
    ]
    scalars += [ScalarBinding(buffer=name, values=(0.0,)) for name in extra]
    program = Program(
        mesh=Mesh(axes=(Axis(name="dp", size=1),)),
        flats=flats,
        buffers=made.buffers(flats),
        segments=made.segments(),
        sections=tuple(sections),
        inputs=(
            InputBinding(path="x", buffer="input.x", dtype=DType.F32, shape=(batch, features)),
        ),
        scalars=tuple(scalars),
        groups=(
            OptimizerGroup(
                name="default",
                algorithm=made.algorithm,
                intervals=tuple((home.name, 0, home.padded_numel) for home in flats),
                lr="lr",
                hyper="hyper",
            ),
        ),
        reports=tuple(
            ReportBinding(quantity=quantity, buffer=buffer)
            for quantity, buffer, is_there in (
                (Quantity.LOSS, "loss", True),
                (Quantity.BATCH_LOSS, "loss", True),
                (Quantity.SUMMED_LOSS, "loss", True),
                (Quantity.STEP, "step", True),
                (Quantity.LOSS_SCALE, "loss_scale", made.has_scaling),
                (Quantity.SKIP, "skip", made.has_scaling),
                (Quantity.SQUARED_NORM, "norm", clip is not None),
            )
            if is_there
        ),
        options=WrittenOptions.of(
            {
                "micro_steps": "1",
                "optimizer": optimizer,
                "precision": precision,
                "stage": "0",
                "world_size": "1",
            }
        ),
    )
    return corrected(program)
