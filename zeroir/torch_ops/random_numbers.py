"""Random numbers that are functions of a seed and an element's position, instead of torch's generators.

Torch's generators differ between devices and have hidden state. Under the mode ``SeededRandomOps`` every random
operator uses the next seed of the program, as a dropout does, and computes its numbers from ``zeroir::uniform`` with
plain operators. The numbers differ from torch's, but their distributions are the same.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroir.errors import UserError
from zeroir.torch_ops.define import define, fake
from zeroir.torch_ops.replaced.dropout import hashed

aten = torch.ops.aten

_BITS = 24


def draw(x: Tensor, seed: Tensor) -> Tensor:
    """Draw numbers from (0, 1) in the shape of ``x`` and on its device, f32 and contiguous.

    They are odd multiples of 2^-24: 23 bits each, and neither 0 nor 1. ``seed`` is i64[1], on the host or on x's
    device.
    """
    # A seed on the host is read at launch, so no device has to wait for it.
    return draw_with(x, int(seed) if seed.device.type == "cpu" else seed)


def draw_with(x: Tensor, seed: Tensor | int) -> Tensor:
    """Compute ``uniform`` with plain operators that a compiler can trace; a tensor seed is on x's device."""
    numbers = hashed(x.numel(), seed, x.device).bitwise_or_(1).to(torch.float32)
    return numbers.mul_(2.0**-_BITS).view(x.shape)


uniform = define("zeroir::uniform", draw)


@fake("zeroir::uniform")
def _(x: Tensor, _: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


class OwnSeedError(UserError):
    """The user's code chooses the seed of random numbers itself."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, while a program draws from the seed of the engine, other numbers at every step: draw them before "
            "the step into a tensor, whose present values count, pass them with the batch, or leave out that seed"
        )


@contextlib.contextmanager
def own_seeds_refused() -> Iterator[None]:
    """Within the block, raise an OwnSeedError where code seeds torch's generator."""
    generator = _UnseededGenerator(torch.default_generator)
    with mock.patch.object(torch.random, "default_generator", generator):
        yield


class _UnseededGenerator:
    """Torch's generator, whose state cannot be replaced by another one."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get_state(self) -> Tensor:
        return self._generator.get_state()

    def initial_seed(self) -> int:
        return self._generator.initial_seed()

    def set_state(self, state: Tensor) -> object:
        if not _is_called_by_libraries():
            raise OwnSeedError("sets the state of torch's generator")
        return self._generator.set_state(state)

    def manual_seed(self, _: int) -> object:
        raise OwnSeedError("seeds torch's generator")

    def seed(self) -> int:
        raise OwnSeedError("seeds torch's generator")


def _is_called_by_libraries() -> bool:
    """Return whether code of torch's or zeroir's, such as a tracer, sets the state, which it read before."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OF_GENERATORS:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES)


_OF_GENERATORS: Final = (__file__, torch.random.__file__, contextlib.__file__)
_LIBRARIES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class SeededRandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which each random operator uses one or two seeds (i64[1])."""

    supports_higher_order_operators = True

    def __init__(self, seed: Callable[[], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload | torch._ops.HigherOrderOperator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func`` or its replacement.

        Raises:
            OwnSeedError: if it draws from a generator of the user's.
        """
        rule = _RULES.get(str(getattr(func, "overloadpacket", None)))
        if rule is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        named_args = _NamedArguments({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        if named_args.named.get("generator") is not None:
            raise OwnSeedError("draws from a torch.Generator (generator=)")
        with torch._C.DisableTorchFunction():
            return rule(named_args, _SeededNumbers(self._seed))


@dataclass(frozen=True)
class _SeededNumbers:
    """Random numbers; each tensor of them uses the next seeds."""

    seed: Callable[[], Tensor]

    def uniform(self, like: Tensor) -> Tensor:
        """Draw uniform numbers from (0, 1), f32."""
        return cast("Tensor", uniform(like, self.seed()))

    def normal(self, like: Tensor) -> Tensor:
        """Draw normal numbers with mean 0 and deviation 1, f32."""
        return torch.erfinv(self.uniform(like) * 2 - 1) * math.sqrt(2)

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        """Draw integers from [``low``, ``high``), i64; in a range of more than 2^44 numbers some never occur."""
        values = self.uniform(like).double()
        if high - low > 1 << 12:
            values = values + self.uniform(like).double() * 2.0**-_BITS
        return (values * (high - low)).floor().clamp(max=high - low - 1).long() + low


@dataclass(frozen=True)
class _NamedArguments:
    """The arguments of a call by name."""

    named: Mapping[str, object]

    def tensor(self, name: str = "self") -> Tensor:
        return cast("Tensor", self.named[name])

    def number(self, name: str, default: float) -> float:
        value = self.named.get(name)
        return default if value is None else cast("float", value)

    def factor(self, name: str, default: float) -> Tensor | float:
        """Return a parameter of a distribution, which is a number or a tensor."""
        value = self.named.get(name)
        return default if value is None else cast("Tensor | float", value)

    def like(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor with the shape and type of the result."""
        kind = cast("torch.dtype | None", self.named.get("dtype")) or dtype
        if "self" in self.named:
            return torch.empty_like(self.tensor(), dtype=kind)
        size = cast("Sequence[int]", self.named["size"])
        device = cast("torch.device | None", self.named.get("device"))
        return torch.empty(size, dtype=kind, device=device)


Rule = Callable[[_NamedArguments, _SeededNumbers], object]
_Sampler = Callable[[_NamedArguments, _SeededNumbers, Tensor], Tensor]


def _in_place(sample: _Sampler) -> Rule:
    """Return the rule of an operator that fills its tensor."""

    def rule(args: _NamedArguments, numbers: _SeededNumbers) -> object:
        x = args.tensor()
        return x.copy_(sample(args, numbers, x))

    return rule


def _new(sample: _Sampler, dtype: torch.dtype | None = None) -> Rule:
    """Return the rule of an operator that makes a tensor, by default of ``dtype``."""

    def rule(args: _NamedArguments, numbers: _SeededNumbers) -> object:
        like = args.like(dtype)
        return torch.empty_like(like).copy_(sample(args, numbers, like))

    return rule


def _uniform(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    low, high = args.number("from", 0.0), args.number("to", 1.0)
    values = numbers.uniform(like)
    return values if (low, high) == (0.0, 1.0) else values * (high - low) + low


def _normal(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    return numbers.normal(like) * args.factor("std", 1.0) + args.factor("mean", 0.0)


def _log_normal(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    return (numbers.normal(like) * args.number("std", 2.0) + args.number("mean", 1.0)).exp()


def _exponential(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    return -numbers.uniform(like).log() / args.number("lambd", 1.0)


def _cauchy(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    angle = (numbers.uniform(like) - 0.5) * math.pi
    return angle.tan() * args.number("sigma", 1.0) + args.number("median", 0.0)


def _geometric(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    p = args.number("p", 0.5)
    if p >= 1:
        return torch.ones_like(like)
    return (numbers.uniform(like).log() / math.log1p(-p)).ceil()


def _bernoulli(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    return numbers.uniform(like) < args.factor("p", 0.5)


def _integers(args: _NamedArguments, numbers: _SeededNumbers, like: Tensor) -> Tensor:
    high = args.named.get("high", args.named.get("to"))
    if high is None:
        # The range in which the dtype represents every integer.
        epsilon = torch.finfo(like.dtype).eps if like.is_floating_point() else 0.0
        limit = round(2 / epsilon) if epsilon else min(torch.iinfo(like.dtype).max, 1 << 44)
        high = limit if "from" not in args.named else limit - 1
    low = args.number("low", args.number("from", 0))
    return numbers.integers(like, int(low), int(cast("int", high)))


def _bernoulli_of(args: _NamedArguments, numbers: _SeededNumbers) -> object:
    """Compute ``bernoulli(x)`` with the probabilities x, or ``bernoulli(x, p)`` with the probability p."""
    x = args.tensor()
    values = (
        numbers.uniform(x) < args.factor("p", 0.5)
        if "p" in args.named
        else (numbers.uniform(x) < x)
    )
    return torch.empty_like(x).copy_(values)


def _normal_of(args: _NamedArguments, numbers: _SeededNumbers) -> object:
    """Compute ``normal(mean, std)``, where one is a tensor or ``size`` is the shape."""
    mean, std = args.factor("mean", 0.0), args.factor("std", 1.0)
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    if tensors:
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
        like = tensors[0].new_empty(shape)
    else:
        like = args.like()
    return like.copy_(numbers.normal(like) * std + mean)


def _permutation(args: _NamedArguments, numbers: _SeededNumbers) -> object:
    count = cast("int", args.named["n"])
    dtype = cast("torch.dtype | None", args.named.get("dtype")) or torch.int64
    device = cast("torch.device | None", args.named.get("device"))
    like = torch.empty(count, device=device)
    return torch.sort(numbers.uniform(like), stable=True)[1].to(dtype)


def _multinomial(args: _NamedArguments, numbers: _SeededNumbers) -> object:
    """Draw categories by their weights, i64: ``num_samples`` for each row, with or without replacement."""
    weights, count = args.tensor(), cast("int", args.named["num_samples"])
    if count > 1 and args.named.get("replacement"):
        bounds = weights.float().cumsum(-1)
        quantiles = numbers.uniform(weights.new_empty((*weights.shape[:-1], count)))
        categories = torch.searchsorted(bounds, quantiles * bounds[..., -1:])
        return categories.clamp(max=weights.shape[-1] - 1)
    # The categories with the shortest independent exponential times (Efraimidis and Spirakis, 2006).
    times = -numbers.uniform(weights).log() / weights.float()
    return torch.topk(times, count, dim=-1, largest=False)[1]


def _leaky(args: _NamedArguments, numbers: _SeededNumbers) -> object:
    """Compute ``rrelu``: random slopes below zero from [``lower``, ``upper``), saved in ``noise`` for the backward."""
    x, noise = args.tensor(), args.tensor("noise")
    lower, upper = args.number("lower", 1 / 8), args.number("upper", 1 / 3)
    if not args.named.get("training"):
        # It is saved anyway, and must not contain undefined memory.
        noise.copy_(torch.zeros_like(noise))
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slopes = numbers.uniform(x) * (upper - lower) + lower
    noise.copy_(torch.where(x > 0, 1.0, slopes))
    return x * noise


def _leaky_in_place(args: _NamedArguments, numbers: _SeededNumbers) -> object:
    return args.tensor().copy_(cast("Tensor", _leaky(args, numbers)))


_RULES: Final[Mapping[str, Rule]] = {
    "aten.bernoulli": _bernoulli_of,
    "aten.bernoulli_": _in_place(_bernoulli),
    "aten.cauchy_": _in_place(_cauchy),
    "aten.exponential_": _in_place(_exponential),
    "aten.geometric_": _in_place(_geometric),
    "aten.log_normal_": _in_place(_log_normal),
    "aten.multinomial": _multinomial,
    "aten.normal": _normal_of,
    "aten.normal_": _in_place(_normal),
    "aten.rand": _new(_uniform),
    "aten.rand_like": _new(_uniform),
    "aten.randint": _new(_integers, torch.int64),
    "aten.randint_like": _new(_integers),
    "aten.randn": _new(_normal),
    "aten.randn_like": _new(_normal),
    "aten.random_": _in_place(_integers),
    "aten.randperm": _permutation,
    "aten.rrelu_with_noise": _leaky,
    "aten.rrelu_with_noise_": _leaky_in_place,
    "aten.uniform_": _in_place(_uniform),
}
