"""Small logical programs made by hand, without tracing and without torch.

``mlp`` is a residual perceptron with a reconstruction loss::

    root.pre    h = x @ W0.T
    blocks.i    h = relu((h * s) @ W.T + b) + h        (s only with keep_fp32)
    root.post   loss = mean((h @ V.T - x) ** 2)        (V is W0.T itself when tied)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from zeroir.frontend.accumulate import accumulate
from zeroir.frontend.weigh import weigh
from zeroir.ir.buffers import Buffer, Region, Role, Space, View, contiguous_stride
from zeroir.ir.contents import FlatContent, Micro, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.factors import factors_numel
from zeroir.ir.mesh import COMPUTE, Axis, Mesh
from zeroir.ir.ops import (
    Algorithm,
    Alloc,
    Argument,
    Average,
    Cast,
    CheckFinite,
    Compute,
    Decide,
    Destination,
    Direction,
    Fill,
    GradNorm,
    Mode,
    Op,
    OptimizerStep,
    Release,
    UpdateScale,
)
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    PARAMETER_ALIGNMENT_NUMEL,
    SHARD_ALIGNMENT_NUMEL,
    UPDATE,
    Flat,
    Holding,
    InputBinding,
    OptimizerGroup,
    Program,
    ScalarBinding,
    Section,
    Slot,
    State,
)
from zeroir.ir.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.workspace.segments import corrected

PRECISIONS = {"fp32": DType.F32, "fp16": DType.F16, "bf16": DType.BF16}


def tensor(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype=dtype, shape=shape, stride=contiguous_stride(shape))


@dataclass
class SegmentBuilder:
    """Number values as they come: inputs first, then one result a node."""

    name: str
    inputs: list[TensorType]
    nodes: list[Node] = field(default_factory=list)
    kinds: list[TensorType] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = list(self.inputs)

    def add(
        self, op: str, *args: NodeArg, result: TensorType, flops: int = 0, **kwargs: NodeArg
    ) -> Ref:
        self.nodes.append(
            Node(op=op, args=args, kwargs=tuple(kwargs.items()), results=(result,), flops=flops)
        )
        self.kinds.append(result)
        return Ref(len(self.kinds) - 1)

    def t(self, value: Ref) -> Ref:
        kind = self.kinds[value.index]
        flipped = TensorType(dtype=kind.dtype, shape=kind.shape[::-1], stride=kind.stride[::-1])
        return self.add("aten.t.default", value, result=flipped)

    def mm(self, a: Ref, b: Ref) -> Ref:
        (m, k), (_, n) = self.kinds[a.index].shape, self.kinds[b.index].shape
        kind = tensor(self.kinds[a.index].dtype, m, n)
        return self.add("aten.mm.default", a, b, result=kind, flops=2 * m * n * k)

    def cast(self, value: Ref, dtype: DType) -> Ref:
        kind = self.kinds[value.index]
        if kind.dtype is dtype:
            return value
        return self.add(
            "aten._to_copy.default", value, result=tensor(dtype, *kind.shape), dtype=dtype
        )

    def same(self, op: str, *args: NodeArg) -> Ref:
        first = next(arg for arg in args if isinstance(arg, Ref))
        return self.add(
            op, *args, result=tensor(self.kinds[first.index].dtype, *self.kinds[first.index].shape)
        )

    def build(self, *outputs: Ref) -> Segment:
        return Segment(
            name=self.name,
            inputs=tuple(self.inputs),
            nodes=tuple(self.nodes),
            outputs=tuple(output.index for output in outputs),
            workspace_bytes=(("eager", 0),),
        )


def flat(
    name: str,
    unit: str,
    dtype: DType,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, tuple[str, ...]],
) -> Flat:
    slots: list[Slot] = []
    offset = 0
    for parameter, shape in shapes.items():
        slot = Slot(name=parameter, offset=offset, shape=shape, aliases=aliases.get(parameter, ()))
        slots.append(slot)
        offset += -(-slot.numel // PARAMETER_ALIGNMENT_NUMEL) * PARAMETER_ALIGNMENT_NUMEL
    used = slots[-1].offset + slots[-1].numel
    padded = -(-used // SHARD_ALIGNMENT_NUMEL) * SHARD_ALIGNMENT_NUMEL
    return Flat(
        name=name,
        unit=unit,
        dtype=dtype,
        is_trainable=True,
        padded_numel=padded,
        slots=tuple(slots),
    )


@dataclass
class _Mlp:
    blocks: int
    dim: int
    features: int
    batch: int
    dtype: DType
    algorithm: Algorithm
    micro_steps: int
    clip: float | None
    tied: bool
    keep_fp32: bool
    has_scaling: bool
    ema: float | None

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
        return tuple(found)

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

    # ---------------------------------------------------------------------------------------------- sections

    def micro_body(self, flats: tuple[Flat, ...], *, is_accumulating: bool) -> list[Op]:
        n, d, f = self.batch, self.dim, self.features
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
            return Argument(
                view=dense(f"{home.name}.param", slot.shape, slot.offset), parameter=name
            )

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
                arguments=tuple(
                    a if isinstance(a, Argument) else Argument(view=a) for a in arguments
                ),
                destinations=tuple(
                    v if isinstance(v, Destination) else Destination(view=v) for v in destinations
                ),
                stream=COMPUTE,
            )

        x, loss = dense("input.x", (n, f)), dense("loss", ())
        loss_destination = Destination(
            view=loss, mode=Mode.ACCUMULATE if is_accumulating else Mode.WRITE
        )
        ops: list[Op] = [
            alloc("h.0"),
            call("pre.forward", "root.pre", [x, argument("pre.weight")], act("h.0")),
        ]
        for i in range(self.blocks):
            unit = f"blocks.{i}"
            scale = [argument(f"{unit}.scale")] if self.keep_fp32 else []
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
        last = f"h.{self.blocks}"
        touched: set[str] = set()

        def begin(*names: str) -> list[Op]:
            """Temporary gradients begin, zeroed, before their first contribution."""
            found: list[Op] = []
            for name in names:
                home = homes[name][0]
                if home.name not in touched and is_accumulating:
                    found += [
                        alloc(f"{home.name}.grad"),
                        fill(f"{home.name}.grad", home.padded_numel),
                    ]
                touched.add(home.name)
            return found

        def finish(*names: str) -> list[Op]:
            """Temporary gradients are complete: add them to the FP32 sums."""
            found: list[Op] = []
            for name in (
                dict.fromkeys(homes[name][0].name for name in names) if is_accumulating else ()
            ):
                numel = next(home.padded_numel for home in flats if home.name == name)
                found += [
                    Cast(
                        source=Region(buffer=f"{name}.grad", offset=0, numel=numel),
                        destination=Region(buffer=f"{name}.grad_sum", offset=0, numel=numel),
                        mode=Mode.ACCUMULATE,
                        stream=COMPUTE,
                    ),
                    release(f"{name}.grad"),
                ]
            return found

        ops += [
            alloc("difference"),
            call(
                "post.forward",
                "root.post",
                [act(last), x, argument("post.weight")],
                loss_destination,
                dense("difference", (n, f)),
            ),
            alloc(f"d.{self.blocks}"),
            *begin("post.weight"),
            call(
                "post.backward",
                "root.post",
                [
                    dense("loss_scale", ()),
                    dense("difference", (n, f)),
                    act(last),
                    argument("post.weight"),
                ],
                act(f"d.{self.blocks}"),
                gradient("post.weight"),
            ),
            release("difference"),
            release(last),
        ]
        if not self.tied:
            ops += finish("post.weight")
        for i in reversed(range(self.blocks)):
            unit = f"blocks.{i}"
            scale_name = [f"{unit}.scale"] if self.keep_fp32 else []
            names = [f"{unit}.weight", f"{unit}.bias", *scale_name]
            ops += [
                alloc(f"d.{i}"),
                *begin(*names),
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
                *finish(*names),
            ]
        mode = Mode.ACCUMULATE if self.tied else Mode.WRITE
        ops += [
            *begin("pre.weight"),
            call("pre.backward", "root.pre", [act("d.0"), x], gradient("pre.weight", mode)),
            release("d.0"),
            *finish("pre.weight"),
        ]
        return ops

    @property
    def hyper(self) -> Region:
        return Region(buffer="hyper", offset=0, numel=len(self.algorithm.hyper_names))

    def update_body(self, flats: tuple[Flat, ...]) -> list[Op]:
        sum_name = "grad_sum" if self.micro_steps > 1 else "grad"
        gradients = tuple(
            Region(buffer=f"{f.name}.{sum_name}", offset=0, numel=f.padded_numel) for f in flats
        )
        ops: list[Op] = []
        if self.has_scaling:
            ops.append(CheckFinite(sources=gradients, destination=one("overflow"), stream=COMPUTE))
        if self.clip is not None:
            ops.append(GradNorm(sources=gradients, destination=one("norm"), stream=COMPUTE))
        skip = one("skip") if self.has_scaling else None
        ops.append(
            Decide(
                step=one("step"),
                gradient_divisor=one("gradient_divisor"),
                divisor=self.micro_steps,
                overflow=one("overflow") if self.has_scaling else None,
                norm=one("norm") if self.clip is not None else None,
                loss_scale=one("loss_scale") if self.has_scaling else None,
                skip=skip,
                max_norm=self.clip,
                stream=COMPUTE,
            )
        )
        for home, gradient in zip(flats, gradients, strict=True):
            is_low = home.dtype.is_low_precision
            is_cast = is_low and self.micro_steps == 1
            grad32 = Region(buffer=f"{home.name}.grad32", offset=0, numel=home.padded_numel)
            param = Region(buffer=f"{home.name}.param", offset=0, numel=home.padded_numel)
            master = Region(buffer=f"{home.name}.master", offset=0, numel=home.padded_numel)
            if is_cast:
                ops += [
                    alloc(grad32.buffer),
                    Cast(source=gradient, destination=grad32, stream=COMPUTE),
                ]
            complete = grad32 if is_cast else gradient
            states = tuple(
                Region(buffer=f"{home.name}.{state}", offset=0, numel=home.padded_numel)
                for state in self.algorithm.state_names
            )
            direction = Region(buffer=f"{home.name}.direction", offset=0, numel=home.padded_numel)
            factors = Region(buffer=f"{home.name}.factors", offset=0, numel=factors_numel(home))
            if self.algorithm.direction_dtype is not None:
                ops += [
                    alloc(direction.buffer),
                    Direction(
                        algorithm=self.algorithm,
                        grad=complete,
                        states=states,
                        direction=direction,
                        step=one("step"),
                        lr=one("lr"),
                        hyper=self.hyper,
                        gradient_divisor=one("gradient_divisor"),
                        skip=skip,
                        stream=COMPUTE,
                    ),
                ]
                complete, states = direction, ()
            ops.append(
                OptimizerStep(
                    algorithm=self.algorithm,
                    param=master if is_low else param,
                    grad=complete,
                    states=states,
                    step=one("step"),
                    lr=one("lr"),
                    hyper=self.hyper,
                    gradient_divisor=one("gradient_divisor"),
                    skip=skip,
                    factors=factors if self.algorithm is Algorithm.ADAFACTOR else None,
                    stream=COMPUTE,
                )
            )
            if self.algorithm.direction_dtype is not None:
                ops.append(release(direction.buffer))
            if self.ema is not None:
                mean = Region(buffer=f"{home.name}.ema", offset=0, numel=home.padded_numel)
                trained = master if is_low else param
                ops.append(
                    Average(param=trained, average=mean, decay=self.ema, skip=skip, stream=COMPUTE)
                )
            if is_low:
                ops.append(Cast(source=master, destination=param, stream=COMPUTE))
            if is_cast:
                ops.append(release(grad32.buffer))
            if self.micro_steps > 1:
                ops.append(fill(gradient.buffer, home.padded_numel))
        if self.has_scaling:
            state = Region(buffer="loss_scale", offset=0, numel=3)
            ops.append(UpdateScale(state=state, skip=one("skip"), stream=COMPUTE))
        if self.micro_steps > 1:
            ops.append(fill("loss", 1))
        return ops

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
            if self.micro_steps == 1:
                stale = FlatContent(quantity="grad", flat=name, micro=Micro.STALE)
                add(f"{name}.grad", home.dtype, numel, Role.GRAD, holds=stale)
            else:
                past = FlatContent(quantity="grad", flat=name, micro=Micro.PAST)
                add(f"{name}.grad", home.dtype, numel, Role.GRAD)
                add(f"{name}.grad_sum", DType.F32, numel, Role.GRAD, holds=past)
            if home.dtype.is_low_precision:
                add(
                    f"{name}.master",
                    DType.F32,
                    numel,
                    Role.MASTER,
                    holds=FlatContent(quantity="master", flat=name),
                )
                if self.micro_steps == 1:
                    add(f"{name}.grad32", DType.F32, numel, Role.STAGING)
            if self.algorithm is Algorithm.ADAFACTOR:
                held = FlatContent(quantity="factors", flat=name)
                add(f"{name}.factors", DType.F32, factors_numel(home), Role.STATE, holds=held)
            if self.algorithm.direction_dtype is not None:
                add(f"{name}.direction", self.algorithm.direction_dtype, numel, Role.STAGING)
            averages = () if self.ema is None else ("ema",)
            for state in (*self.algorithm.state_names, *averages):
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


def alloc(name: str) -> Alloc:
    return Alloc(buffer=name, stream=COMPUTE)


def release(name: str) -> Release:
    return Release(buffer=name, stream=COMPUTE)


def fill(name: str, numel: int) -> Fill:
    return Fill(destination=Region(buffer=name, offset=0, numel=numel), value=0.0, stream=COMPUTE)


def one(name: str) -> Region:
    return Region(buffer=name, offset=0, numel=1)


def dense(name: str, shape: tuple[int, ...], offset: int = 0) -> View:
    numel = 1
    for size in shape:
        numel *= size
    region = Region(buffer=name, offset=offset, numel=numel)
    return View(region=region, shape=shape, stride=contiguous_stride(shape))


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
    has_fixed_divisor: bool = False,
) -> Program:
    """The logical program of the module's docstring; x is f32[batch, features] on every rank.

    With ``has_fixed_divisor`` the number of micro-steps is in the divisor, as in programs of earlier versions.
    """
    if is_weighted or (micro_steps > 1 and not has_fixed_divisor):
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
        )
        program = weigh(program) if is_weighted else program
        program = accumulate(program) if micro_steps > 1 else program
        options = {**program.option, "micro_steps": str(micro_steps)}
        return corrected(replace(program, options=tuple(sorted(options.items()))))
    made = _Mlp(
        blocks=blocks,
        dim=dim,
        features=features,
        batch=batch,
        dtype=PRECISIONS[precision],
        algorithm=Algorithm(optimizer),
        micro_steps=micro_steps,
        clip=clip,
        tied=tied,
        keep_fp32=keep_fp32,
        has_scaling=precision == "fp16",
        ema=ema,
    )
    flats = made.flats()
    sum_name = "grad_sum" if micro_steps > 1 else "grad"
    complete = State(
        holdings=tuple(
            Holding(
                region=Region(buffer=f"{home.name}.{sum_name}", offset=0, numel=home.padded_numel),
                content=FlatContent(quantity="grad", flat=home.name, micro=Micro.ALL),
            )
            for home in flats
        )
    )
    body = tuple(made.micro_body(flats, is_accumulating=micro_steps > 1))
    sections = [
        Section(name=LAST_MICRO_STEP, body=body, exit=complete),
        Section(name=UPDATE, entry=complete, body=tuple(made.update_body(flats))),
    ]
    if micro_steps > 1:
        sections.insert(0, Section(name=MICRO_STEP, body=body))
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
        loss="loss",
        options=(
            ("micro_steps", str(micro_steps)),
            ("optimizer", optimizer),
            ("precision", precision),
            ("stage", "0"),
            ("world_size", "1"),
        ),
    )
    return corrected(program)
