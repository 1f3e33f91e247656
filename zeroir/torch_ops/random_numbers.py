"""Random numbers that are functions of a seed and an element's position, in the place of those of torch's generators.

Torch's generators differ between devices and keep hidden state. Under the mode ``Draws`` every operator that draws
takes the next seed of the program instead, as a dropout does, and makes its numbers from ``zeroir::uniform`` with plain
operators. What a model draws is then the program's own: other numbers than torch's, of the same distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroir.torch_ops.define import define, fake
from zeroir.torch_ops.dropout import hashed

aten = torch.ops.aten

_BITS = 24


def draw(x: Tensor, seed: Tensor) -> Tensor:
    """Numbers of (0, 1) in the shape of ``x`` and on its device, f32 and contiguous.

    They are odd multiples of 2^-24: 23 bits each, and neither 0 nor 1. ``seed`` is i64[1], on the host or on x's
    device.
    """
    # A seed on the host is read at launch; no device waits for it.
    return draw_with(x, int(seed) if seed.device.type == "cpu" else seed)


def draw_with(x: Tensor, seed: Tensor | int) -> Tensor:
    """What ``uniform`` computes, in plain operators that a compiler can trace; a tensor of seeds is on x's device."""
    numbers = hashed(x.numel(), seed, x.device).bitwise_or_(1).to(torch.float32)
    return numbers.mul_(2.0**-_BITS).view(x.shape)


uniform = define("zeroir::uniform", draw)


@fake("zeroir::uniform")
def _(x: Tensor, _: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which operators that draw random numbers take a seed (i64[1]) each, or two."""

    def __init__(self, seed: Callable[[], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call ``func``, or what stands for it."""
        rule = _RULES.get(str(func._overloadpacket))
        if rule is None:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = _Given({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        with torch._C.DisableTorchFunction():
            return rule(given, _Source(self._seed))


@dataclass(frozen=True)
class _Source:
    """Where numbers come from."""

    seed: Callable[[], Tensor]

    def uniform(self, like: Tensor) -> Tensor:
        """Of (0, 1), f32."""
        return cast("Tensor", uniform(like, self.seed()))

    def normal(self, like: Tensor) -> Tensor:
        """Of mean 0 and deviation 1, f32."""
        return torch.erfinv(self.uniform(like) * 2 - 1) * math.sqrt(2)

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        """From ``low`` up to, but not including, ``high``, i64; from 2^44 numbers on some are left out."""
        drawn = self.uniform(like).double()
        if high - low > 1 << 12:
            drawn = drawn + self.uniform(like).double() * 2.0**-_BITS
        return (drawn * (high - low)).floor().clamp(max=high - low - 1).long() + low


@dataclass(frozen=True)
class _Given:
    """The arguments of a call by name."""

    named: Mapping[str, object]

    def tensor(self, name: str = "self") -> Tensor:
        return cast("Tensor", self.named[name])

    def number(self, name: str, default: float) -> float:
        found = self.named.get(name)
        return default if found is None else cast("float", found)

    def factor(self, name: str, default: float) -> Tensor | float:
        """A parameter of a distribution: a number, or a tensor of them."""
        found = self.named.get(name)
        return default if found is None else cast("Tensor | float", found)

    def like(self, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the shape and type of the result."""
        kind = cast("torch.dtype | None", self.named.get("dtype")) or dtype
        if "self" in self.named:
            return torch.empty_like(self.tensor(), dtype=kind)
        size = cast("Sequence[int]", self.named["size"])
        device = cast("torch.device | None", self.named.get("device"))
        return torch.empty(size, dtype=kind, device=device)


Rule = Callable[[_Given, _Source], object]
_Sampled = Callable[[_Given, _Source, Tensor], Tensor]


def _in_place(sampled: _Sampled) -> Rule:
    """The rule of an operator that fills its tensor."""

    def rule(given: _Given, source: _Source) -> object:
        x = given.tensor()
        return x.copy_(sampled(given, source, x))

    return rule


def _made(sampled: _Sampled, dtype: torch.dtype | None = None) -> Rule:
    """The rule of an operator that makes a tensor, of ``dtype`` where it is told of none."""

    def rule(given: _Given, source: _Source) -> object:
        like = given.like(dtype)
        return torch.empty_like(like).copy_(sampled(given, source, like))

    return rule


def _uniform(given: _Given, source: _Source, like: Tensor) -> Tensor:
    low, high = given.number("from", 0.0), given.number("to", 1.0)
    drawn = source.uniform(like)
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


def _normal(given: _Given, source: _Source, like: Tensor) -> Tensor:
    return source.normal(like) * given.factor("std", 1.0) + given.factor("mean", 0.0)


def _log_normal(given: _Given, source: _Source, like: Tensor) -> Tensor:
    return (source.normal(like) * given.number("std", 2.0) + given.number("mean", 1.0)).exp()


def _exponential(given: _Given, source: _Source, like: Tensor) -> Tensor:
    return -source.uniform(like).log() / given.number("lambd", 1.0)


def _cauchy(given: _Given, source: _Source, like: Tensor) -> Tensor:
    angle = (source.uniform(like) - 0.5) * math.pi
    return angle.tan() * given.number("sigma", 1.0) + given.number("median", 0.0)


def _geometric(given: _Given, source: _Source, like: Tensor) -> Tensor:
    p = given.number("p", 0.5)
    if p >= 1:
        return torch.ones_like(like)
    return (source.uniform(like).log() / math.log1p(-p)).ceil()


def _bernoulli(given: _Given, source: _Source, like: Tensor) -> Tensor:
    return source.uniform(like) < given.factor("p", 0.5)


def _integers(given: _Given, source: _Source, like: Tensor) -> Tensor:
    high = given.named.get("high", given.named.get("to"))
    if high is None:
        # As many as every number of the dtype up to there can be told from its neighbours.
        bits = torch.finfo(like.dtype).eps if like.is_floating_point() else 0.0
        most = round(2 / bits) if bits else min(torch.iinfo(like.dtype).max, 1 << 44)
        high = most if "from" not in given.named else most - 1
    low = given.number("low", given.number("from", 0))
    return source.integers(like, int(low), int(cast("int", high)))


def _bernoulli_of(given: _Given, source: _Source) -> object:
    """``bernoulli(x)`` takes its probabilities from x itself, ``bernoulli(x, p)`` the number p."""
    x = given.tensor()
    drawn = (
        source.uniform(x) < given.factor("p", 0.5)
        if "p" in given.named
        else (source.uniform(x) < x)
    )
    return torch.empty_like(x).copy_(drawn)


def _normal_of(given: _Given, source: _Source) -> object:
    """``normal(mean, std)`` where either is a tensor, or ``size`` says the shape."""
    mean, std = given.factor("mean", 0.0), given.factor("std", 1.0)
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    if tensors:
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
        like = tensors[0].new_empty(shape)
    else:
        like = given.like()
    return like.copy_(source.normal(like) * std + mean)


def _permutation(given: _Given, source: _Source) -> object:
    count = cast("int", given.named["n"])
    dtype = cast("torch.dtype | None", given.named.get("dtype")) or torch.int64
    device = cast("torch.device | None", given.named.get("device"))
    like = torch.empty(count, device=device)
    return torch.sort(source.uniform(like), stable=True)[1].to(dtype)


def _multinomial(given: _Given, source: _Source) -> object:
    """Categories by their weights, i64: several of one row either with replacement or without."""
    weights, count = given.tensor(), cast("int", given.named["num_samples"])
    if count > 1 and given.named.get("replacement"):
        bounds = weights.float().cumsum(-1)
        wanted = source.uniform(weights.new_empty((*weights.shape[:-1], count)))
        found = torch.searchsorted(bounds, wanted * bounds[..., -1:])
        return found.clamp(max=weights.shape[-1] - 1)
    # The first of several independent waiting times (as Efraimidis and Spirakis, 2006, have it).
    times = -source.uniform(weights).log() / weights.float()
    return torch.topk(times, count, dim=-1, largest=False)[1]


def _leaky(given: _Given, source: _Source) -> object:
    """``rrelu``: slopes between ``lower`` and ``upper`` below zero, which ``noise`` keeps for the backward."""
    x, noise = given.tensor(), given.tensor("noise")
    lower, upper = given.number("lower", 1 / 8), given.number("upper", 1 / 3)
    if not given.named.get("training"):
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slopes = source.uniform(x) * (upper - lower) + lower
    noise.copy_(torch.where(x > 0, 1.0, slopes))
    return x * noise


def _leaky_in_place(given: _Given, source: _Source) -> object:
    return given.tensor().copy_(cast("Tensor", _leaky(given, source)))


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
    "aten.rand": _made(_uniform),
    "aten.rand_like": _made(_uniform),
    "aten.randint": _made(_integers, torch.int64),
    "aten.randint_like": _made(_integers),
    "aten.randn": _made(_normal),
    "aten.randn_like": _made(_normal),
    "aten.random_": _in_place(_integers),
    "aten.randperm": _permutation,
    "aten.rrelu_with_noise": _leaky,
    "aten.rrelu_with_noise_": _leaky_in_place,
    "aten.uniform_": _in_place(_uniform),
}
