"""The segments, flats and buffers of ``programs.mlp``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.support.pieces import SegmentBuilder, flat, tensor
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import FlatContent, Micro, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel
from zeroir.ir.layout import Parameter, layout
from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.forms import ABSMAX, CODES
from zeroir.ir.own_coordinates import own_numel
from zeroir.ir.program import Flat
from zeroir.ir.segments.segment import Ref, Segment


def _in_blocks(home: Flat) -> Flat:
    """The flat with parameters that begin at blocks, as 8-bit states ask for."""
    parameters = [Parameter(name=s.name, shape=s.shape, aliases=s.aliases) for s in home.slots]
    slots, padded_numel = layout(parameters, 1, alignment_numel=BLOCK_NUMEL)
    return replace(home, slots=slots, padded_numel=padded_numel)


@dataclass
class Perceptron:
    """The sizes and settings of ``programs.mlp``, and what its program is made of beside the sections."""

    blocks: int
    dim: int
    features: int
    batch: int
    dtype: DType
    algorithm: Algorithm
    clip: float | None
    tied: bool
    keep_fp32: bool
    has_scaling: bool
    ema: float | None
    has_codes: bool

    def flats(self) -> tuple[Flat, ...]:
        aliases = {"pre.weight": ("post.weight",)} if self.tied else {}
        found = [
            flat(
                "root.pre",
                "root.pre",
                self.dtype,
                {"pre.weight": (self.dim, self.features)},
                aliases,
            )
        ]
        for i in range(self.blocks):
            unit = f"blocks.{i}"
            found.append(
                flat(
                    unit,
                    unit,
                    self.dtype,
                    {f"{unit}.weight": (self.dim, self.dim), f"{unit}.bias": (self.dim,)},
                    {},
                )
            )
            if self.keep_fp32:
                found.append(
                    flat(f"{unit}.fp32", unit, DType.F32, {f"{unit}.scale": (self.dim,)}, {})
                )
        if not self.tied:
            found.append(
                flat(
                    "root.post",
                    "root.post",
                    self.dtype,
                    {"post.weight": (self.features, self.dim)},
                    {},
                )
            )
        return tuple(map(_in_blocks, found)) if self.has_codes else tuple(found)

    # ---------------------------------------------------------------------------------------------- segments

    def segments(self) -> tuple[Segment, ...]:
        d, f, n = self.dim, self.features, self.batch
        act, x = tensor(self.dtype, n, d), tensor(DType.F32, n, f)
        scale = [tensor(DType.F32, d)] if self.keep_fp32 else []

        pre = SegmentBuilder("pre.forward", [x, tensor(self.dtype, d, f)])
        x_low = pre.cast(Ref(0), self.dtype)
        pre_forward = pre.build(pre.mm(x_low, pre.t(Ref(1))))

        block = SegmentBuilder(
            "block.forward", [act, tensor(self.dtype, d, d), tensor(self.dtype, d), *scale]
        )
        h = (
            block.same("aten.mul.Tensor", block.cast(Ref(0), DType.F32), Ref(3))
            if scale
            else Ref(0)
        )
        h = block.cast(h, self.dtype)
        z = block.add(
            "aten.addmm.default", Ref(2), h, block.t(Ref(1)), result=act, flops=2 * n * d * d
        )
        r = block.same("aten.relu.default", z)
        block_forward = block.build(block.same("aten.add.Tensor", r, Ref(0)), r)

        post_weight = tensor(self.dtype, d, f) if self.tied else tensor(self.dtype, f, d)
        post = SegmentBuilder("post.forward", [act, x, post_weight])
        out = post.mm(Ref(0), Ref(2) if self.tied else post.t(Ref(2)))
        difference = post.same("aten.sub.Tensor", post.cast(out, DType.F32), Ref(1))
        square = post.same("aten.mul.Tensor", difference, difference)
        loss = post.add("aten.mean.default", square, result=tensor(DType.F32))
        post_forward = post.build(loss, difference)

        bpost = SegmentBuilder("post.backward", [tensor(DType.F32), x, act, post_weight])
        gradient = bpost.same("aten.mul.Tensor", Ref(1), 2.0 / (n * f))
        gradient = bpost.cast(bpost.same("aten.mul.Tensor", gradient, Ref(0)), self.dtype)
        if self.tied:
            dv, dh = bpost.mm(bpost.t(Ref(2)), gradient), bpost.mm(gradient, bpost.t(Ref(3)))
        else:
            dv, dh = bpost.mm(bpost.t(gradient), Ref(2)), bpost.mm(gradient, Ref(3))
        post_backward = bpost.build(dh, dv)

        back = SegmentBuilder("block.backward", [act, act, act, tensor(self.dtype, d, d), *scale])
        dz = back.same("aten.threshold_backward.default", Ref(0), Ref(1), 0)
        if scale:
            h = back.cast(
                back.same("aten.mul.Tensor", back.cast(Ref(2), DType.F32), Ref(4)), self.dtype
            )
        else:
            h = Ref(2)
        dw = back.mm(back.t(dz), h)
        db = back.add("aten.sum.dim_IntList", dz, (0,), result=tensor(self.dtype, d))
        dx = back.mm(dz, Ref(3))
        outputs = [dw, db]
        if scale:
            dx32 = back.cast(dx, DType.F32)
            ds = back.same("aten.mul.Tensor", dx32, back.cast(Ref(2), DType.F32))
            outputs.append(back.add("aten.sum.dim_IntList", ds, (0,), result=tensor(DType.F32, d)))
            dx = back.cast(back.same("aten.mul.Tensor", dx32, Ref(4)), self.dtype)
        block_backward = back.build(back.same("aten.add.Tensor", dx, Ref(0)), *outputs)

        bpre = SegmentBuilder("pre.backward", [act, x])
        pre_backward = bpre.build(bpre.mm(bpre.t(Ref(0)), bpre.cast(Ref(1), self.dtype)))
        return (
            pre_forward,
            block_forward,
            post_forward,
            post_backward,
            block_backward,
            pre_backward,
        )

    @property
    def hyper(self) -> Region:
        return Region(buffer="hyper", offset=0, numel=len(self.algorithm.hyper_names))

    # ----------------------------------------------------------------------------------------------- buffers

    def buffers(self, flats: tuple[Flat, ...]) -> tuple[Buffer, ...]:
        n, d, f = self.batch, self.dim, self.features
        found: list[Buffer] = []

        def add(
            name: str,
            dtype: DType,
            numel: int,
            role: Role,
            *,
            space: Space = Space.DEVICE,
            holds: FlatContent | NamedContent | None = None,
        ) -> None:
            found.append(
                Buffer(name=name, dtype=dtype, numel=numel, space=space, role=role, holds=holds)
            )

        for home in flats:
            name, numel = home.name, home.padded_numel
            add(
                f"{name}.param",
                home.dtype,
                numel,
                Role.PARAM,
                holds=FlatContent(quantity="param", flat=name),
            )
            stale = FlatContent(quantity="grad", flat=name, micro=Micro.STALE)
            add(f"{name}.grad", home.dtype, numel, Role.GRAD, holds=stale)
            if home.dtype.is_low_precision:
                add(
                    f"{name}.master",
                    DType.F32,
                    numel,
                    Role.MASTER,
                    holds=FlatContent(quantity="master", flat=name),
                )
                add(f"{name}.grad32", DType.F32, numel, Role.STAGING)
            if self.algorithm is Algorithm.ADAFACTOR:
                held = FlatContent(quantity="factors", flat=name)
                add(
                    f"{name}.factors", DType.F32, own_numel("factors", home), Role.STATE, holds=held
                )
            if self.algorithm.direction_dtype is not None:
                add(f"{name}.direction", self.algorithm.direction_dtype, numel, Role.STAGING)
            averages = () if self.ema is None else ("ema",)
            states = self.algorithm.state_names
            for state in states if self.has_codes else ():
                for quantity, dtype, count in (
                    (CODES[state], DType.U8, numel),
                    (ABSMAX[state], DType.F32, blocks_numel(numel)),
                ):
                    content = FlatContent(quantity=quantity, flat=name)
                    add(f"{name}.{quantity}", dtype, count, Role.STATE, holds=content)
            for state in (*(() if self.has_codes else states), *averages):
                add(
                    f"{name}.{state}",
                    DType.F32,
                    numel,
                    Role.STATE,
                    holds=FlatContent(quantity=state, flat=name),
                )

        def scalar(
            name: str, dtype: DType = DType.F32, numel: int = 1, space: Space = Space.DEVICE
        ) -> None:
            add(name, dtype, numel, Role.SCALAR, space=space, holds=NamedContent(name=name))

        scalar("loss")
        scalar("loss_scale", numel=3)
        scalar("step")
        scalar("lr", DType.F64)
        scalar("hyper", DType.F64, self.hyper.numel, Space.HOST)
        scalar("gradient_divisor")
        if self.has_scaling:
            scalar("overflow")
            scalar("skip")
        if self.clip is not None:
            scalar("norm")
        add("input.x", DType.F32, n * f, Role.INPUT, holds=NamedContent(name="input.x"))
        for i in range(self.blocks + 1):
            add(f"h.{i}", self.dtype, n * d, Role.SAVED)
            add(f"d.{i}", self.dtype, n * d, Role.ACTIVATION)
        for i in range(self.blocks):
            add(f"blocks.{i}.relu", self.dtype, n * d, Role.SAVED)
        add("difference", DType.F32, n * f, Role.SAVED)
        return tuple(found)
