"""Runs a module's forward as it is, on given tensors instead of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.frontend.opaque.structure import Structure, taken_apart
from zeroir.torch_ops.conditions import tracing_conditions
from zeroir.torch_ops.neutral import NeutralOps
from zeroir.torch_ops.opaque import generators_seeded, seed_of_site

Forward = Callable[..., object]
T = TypeVar("T")


class ResultType(NamedTuple):
    """The type of a result without its sizes, and whether it has a gradient.

    ``order`` has the dimensions from that with the largest stride to that with the smallest.
    """

    order: tuple[int, ...]
    dtype: torch.dtype
    is_differentiated: bool

    def empty(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Return a tensor of this type."""
        strides, step = [1] * len(shape), 1
        for axis in reversed(self.order):
            strides[axis] = step
            step = step * shape[axis]
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=device)


class SeededOps(NeutralOps):
    """The mode for one opaque call: each dropout and random operator has a seed that depends on the call's.

    Once it ``is_backward``, none may be drawn. ``place`` begins the sentence that says so.
    """

    is_traced = False

    def __init__(self, seed: int, place: str = "") -> None:
        super().__init__(torch.empty(0, dtype=torch.int64))
        self._seed_of_call, self._place = seed, place
        self.is_backward = False

    def seed(self) -> Tensor:
        """Return the seed of the next dropout or random operator, i64[1].

        Raises:
            UserError: in the backward.
        """
        if self.is_backward:
            place = self._place
            raise UserError(
                f"{place} draws random numbers in its backward, which would be others than those of its forward: set "
                "its dropout to 0."
            )
        self.sites += 1
        return torch.tensor([seed_of_site(self._seed_of_call, self.sites)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a module's forward returned.

    ``changed`` are the new values of the inputs that it changed, by their positions, and ``leaves`` are the inputs that
    have the gradients. ``passed`` has the positions of arguments that it may pass on, by their ids.
    """

    values: object
    changed: Mapping[int, Tensor]
    leaves: Sequence[Tensor]
    passed: Mapping[int, int]

    def taken_apart(self, place: str) -> tuple[Structure, list[Tensor]]:
        """Return what forward returns without tensors; then these. Marks stand for objects in which tensors may be."""
        structure, tensors, _ = taken_apart(
            self.values, place, "returns", may_have_objects=True, passed=self.passed
        )
        return structure, tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTensor:
    """A parameter or buffer of an opaque module, or a tensor that is an attribute, by each of its names in it.

    ``is_statistic`` is whether it is a buffer that checkpoints have and that may be a number which forward counts.
    """

    names: tuple[str, ...]
    is_parameter: bool
    is_statistic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerForward:
    """A module's forward with what it is called with, except tensors.

    ``place`` begins a sentence with the line of its forward and the name of the module. ``training`` are the flags of
    the module and its submodules, and ``autocast`` is CPU's: whether it is on, and its dtype. What own code around
    modules returns of these is no result of its own.
    """

    path: str
    place: str
    own: tuple[OwnTensor, ...]
    arguments: Structure
    training: tuple[bool, ...]
    autocast: tuple[bool, torch.dtype]
    is_own_code: bool = False

    def run(
        self,
        module: nn.Module,
        forward: Forward,
        inputs: Sequence[Tensor],
        sizes: Sequence[int],
        seed: int,
        trained: Sequence[int] | None,
        may_change: Set[int],
        use: Callable[[Returned], T],
    ) -> T:
        """Call ``forward``, the plain one of ``module``, with the module's own tensors first among ``inputs``.

        ``sizes`` are those among its arguments. With ``trained`` gradients are recorded, of the inputs at these
        positions. Of those that it ``may_change`` it gets copies.

        Returns:
            what ``use`` makes of what forward returns, while the tensors are in the module: its code may run in the
            backward, too.

        Raises:
            UserError: if forward changes another one in place.
        """
        count = len(self.own)
        enabled, dtype = self.autocast
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.set_grad_enabled(trained is not None))
            # All buffers share memory, and with views of it they would share the counter of changes.
            leaves = [x.data for x in inputs]
            for number in trained or ():
                leaves[number].requires_grad_()
            used = [x.clone() if i in may_change else x for i, x in enumerate(leaves)]
            versions = [x._version for x in used]
            args, kwargs = cast(
                "tuple[tuple[object, ...], dict[str, object]]",
                self.arguments.filled(used[count:], sizes),
            )
            stack.enter_context(generators_seeded(seed))
            stack.enter_context(_flags(module, self.training))
            present = stack.enter_context(tensors_swapped(module, self.own, used[:count]))
            stack.enter_context(tracing_conditions())
            stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=enabled))
            ops = stack.enter_context(SeededOps(seed, self.place))
            values = forward(*args, **kwargs)
            ops.is_backward = True
            after = [*present(), *used[count:]]
            with torch._C.DisableTorchFunction():  # these calls are not the module's
                changed = {
                    number: value
                    for number, (value, version) in enumerate(zip(after, versions, strict=True))
                    if value is not used[number] or value._version != version
                }
            unexpected = sorted(changed.keys() - may_change)
            if unexpected:
                place = self.place
                raise UserError(
                    f"{place} changed {self._name(unexpected[0])} in place, which it did not when the program was "
                    "compiled: clone it first."
                )
            passed = {
                id(x): number
                for number, x in enumerate(used[count:], count)
                if self.is_own_code and number not in changed
            }
            return use(Returned(values=values, changed=changed, leaves=leaves, passed=passed))

    def _name(self, number: int) -> str:
        """Return what an input is called in messages."""
        count = len(self.own)
        return self.own[number].names[0] if number < count else f"argument {number - count + 1}"


@contextmanager
def _flags(module: nn.Module, training: Sequence[bool]) -> Iterator[None]:
    modules = list(module.modules())
    before = [each.training for each in modules]
    for each, flag in zip(modules, training, strict=True):
        each.training = flag
    try:
        yield
    finally:
        for each, flag in zip(modules, before, strict=True):
            each.training = flag


@contextmanager
def tensors_swapped(
    module: nn.Module, own: Sequence[OwnTensor], tensors: Sequence[Tensor]
) -> Iterator[Callable[[], list[Tensor]]]:
    """Put tensors in the places of a module's own within the block; yields a function that returns what is there."""
    places = [[_place(module, name) for name in each.names] for each in own]
    before = [[space[key] for space, key in names] for names in places]
    for names, tensor in zip(places, tensors, strict=True):
        for space, key in names:
            space[key] = tensor
    try:
        yield lambda: [names[0][0][names[0][1]] for names in places]
    finally:
        for names, values in zip(places, before, strict=True):
            for (space, key), value in zip(names, values, strict=True):
                space[key] = value


def _place(module: nn.Module, name: str) -> tuple[dict[str, Tensor], str]:
    """Return the dict in which a module has a tensor of this name, and the key."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    spaces: tuple[dict[str, Tensor], ...] = (owner._parameters, owner._buffers)  # type: ignore[assignment]
    return next((space for space in spaces if key in space), vars(owner)), key


def gradients_of(
    leaves: Sequence[Tensor],
    results: Sequence[Tensor],
    gradients: Sequence[Tensor],
    trained: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of the leaves at the positions ``trained``, from those of results; zeros where none is."""
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if result.requires_grad
    ]
    wanted = [leaves[number] for number in trained]
    made: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        made = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
    return [_gradient(leaf, gradient) for leaf, gradient in zip(wanted, made, strict=True)]


def _gradient(leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the gradient in the leaf's layout, with what the code itself has accumulated, as reversible layers do."""
    own, value = leaf.grad, leaf.detach()
    if own is not None:
        gradient = own if gradient is None else own + gradient
    return torch.zeros_like(value) if gradient is None else torch.empty_like(value).copy_(gradient)


def own_tensors(module: nn.Module) -> tuple[OwnTensor, ...]:
    """Return a module's own parameters and buffers, each once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers: Mapping[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in (*parameters.items(), *buffers.items()):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(
        OwnTensor(
            names=tuple(each),
            is_parameter=each[0] in parameters,
            is_statistic=each[0] not in parameters and _is_statistic(module, each[0], tensor),
        )
        for each, tensor in zip(names.values(), tensors.values(), strict=True)
    )


def present_tensors(module: nn.Module, own: Sequence[OwnTensor]) -> list[Tensor]:
    """Return the tensors that stand in the places of a module's own now: in a trace each name of one has another."""
    places = (_place(module, each.names[0]) for each in own)
    return [space[key] for space, key in places]


def _is_statistic(module: nn.Module, name: str, tensor: Tensor) -> bool:
    path, _, key = name.rpartition(".")
    is_kept = key not in module.get_submodule(path)._non_persistent_buffers_set
    return is_kept and (tensor.is_floating_point() or tensor.dim() == 0)
