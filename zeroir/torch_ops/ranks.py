"""The ranks of a job as a model's code sees them: their number, the own rank, and the tensors of all of them.

While a model is traced no process group exists, and one process stands for all ranks. So torch's functions find a
stand-in for the group of all ranks, and a gather is an operator that a program turns into a collective. What depends
on the rank is looked up in a table by the rank, an input of the traced function, so that one program is that of every
rank. Eager replicas have an implementation of their own (``replica_ranks``).
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, Protocol, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from zeroir.errors import InternalError
from zeroir.torch_ops.define import define, differentiate, fake
from zeroir.torch_ops.devices import on_one_device
from zeroir.torch_ops.followed_numbers import FollowedNumber, FollowedNumbers

Function = Callable[..., object]
Arguments = TypeVar("Arguments")

GATHER: Final = "zeroir_ranks.gather.default"
REDUCE: Final = "zeroir_ranks.reduce.default"
"""The names, in a traced graph, of the operators that become collectives."""

SUPPORTED: Final = (
    "a program has all_gather, all_gather_into_tensor, torch.distributed.nn.all_gather, get_rank and get_world_size "
    "over all ranks"
)


_AS_IT_IS: Final = "code that runs as it is must not depend on other ranks"


class CollectiveError(Exception):
    """Code uses the ranks as no program can; the text follows the place of the code."""


def collective_error(error: BaseException) -> CollectiveError | None:
    """Return the CollectiveError that an exception is, or during whose logging torch raised it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CollectiveError):
        cause = cause.__context__
    return cause


class Ranks(Protocol):
    """What the code of a model may ask of the ranks."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def rank(self) -> object:
        """Return the own rank, or what stands for it."""

    def gathered(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, ``[ranks, *x.shape]``; its gradient is summed over all ranks."""


# ------------------------------------------------------------------------------------------- operators of a trace


def _no_kernel(*_: object) -> Tensor:
    raise InternalError(
        "an operator of a trace, which becomes a collective of a program, was called"
    )


def _gather(x: Tensor, ranks: int) -> Tensor:
    return _no_kernel(x, ranks)


def _reduce(x: Tensor) -> Tensor:
    return _no_kernel(x)


_gather_op = define("zeroir_ranks::gather", _gather)
_reduce_op = define("zeroir_ranks::reduce", _reduce)


@fake("zeroir_ranks::gather")
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((ranks, *x.shape))


@fake("zeroir_ranks::reduce")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1:])


differentiate(
    "zeroir_ranks::gather",
    lambda grad: (_reduce_op(grad.contiguous()),),
    lambda _, __: ((), ()),
)


class TracedRanks:
    """The ranks while a model is traced, all at once.

    ``is_asked`` is whether the traced code depends on their number, and ``is_gathering`` whether it gathers.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._thread = threading.get_ident()
        self.is_asked = False
        self.is_gathering = False
        self._numbers = _RankNumbers(self)
        self._rank: Tensor | None = None
        self.lists: list[list[Tensor]] = []
        self._put: list[_Put] = []

    def begin(self, rank: Tensor) -> None:
        """Begin a forward; ``rank`` stands for the own rank, i64[1]."""
        self._rank = rank
        self.lists.clear()
        self._put.clear()

    @property
    def size(self) -> int:
        """The number of ranks."""
        self._ask()
        return self._size

    def _ask(self) -> None:
        if threading.get_ident() != self._thread:
            raise CollectiveError(f"asks for the ranks, but {_AS_IT_IS}")
        self.is_asked = True

    def rank(self) -> object:
        """Return a number that stands for the rank."""
        self._ask()
        return self._numbers.number("rank")

    def gathered(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, ``[ranks, *x.shape]``."""
        self._ask()
        if any(isinstance(size, torch.SymInt) for size in x.shape):
            raise CollectiveError(
                "gathers a tensor whose size depends on a dim of the batch, while ranks need one size: leave shapes "
                "out"
            )
        if x.is_complex():
            raise CollectiveError("gathers complex numbers, which programs do not have")
        self.is_gathering = True
        gathered: Tensor = _gather_op(x.contiguous(), self.size)
        return gathered

    def looked_up(self, table: Sequence[int | float]) -> Tensor:
        """Return the element of a table at the rank, f64[]."""
        assert self._rank is not None
        values = torch.tensor(table, dtype=torch.float64)
        return torch.index_select(values, 0, self._rank).reshape(())

    def is_placing(self, function: Function, arguments: object) -> bool:
        """Return whether a function takes or makes elements at places that depend on the rank."""
        return function in _PLACING and any(
            isinstance(leaf, FollowedNumber) and leaf.numbers is self._numbers
            for leaf in _leaves(arguments)
        )

    def placed(
        self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Return what such a function returns: that of all ranks, of which each selects its own."""
        results: list[Tensor] = []
        for rank in range(self.size):
            self._numbers.values["rank"] = rank
            own = _plain(args)
            self._numbers.values["rank"] = 0
            if function is Tensor.__setitem__:
                results.append(own[0].clone())
                results[-1][own[1]] = own[2]
            else:
                results.append(cast("Tensor", on_one_device(function)(*own, **kwargs)))
        if len({(x.shape, x.dtype) for x in results}) > 1:
            raise CollectiveError("makes a tensor whose shape depends on the rank")
        assert self._rank is not None
        selected = torch.index_select(torch.stack(results), 0, self._rank)[0]
        if function is Tensor.__setitem__:
            args[0].copy_(selected)
            return None
        return selected

    # Code such as `features[rank] = own` puts a tensor at the rank's place of a list. In a trace the list is one
    # element longer for a moment, and that is where the tensor goes. Then each element becomes the tensor on the rank
    # whose place it is. Until that is known, new tensors stand for the elements.

    def open_place(self) -> int:
        """Let the code store a tensor at the rank's place of a gathered list, and return the place."""
        self.settle()
        places = [_Put(items, [item.view_as(item) for item in items]) for items in self.lists]
        for put in places:
            put.items[:] = [*put.before, put.before[0]]
        self._put += places
        return self._size

    @property
    def has_put(self) -> bool:
        """Whether code has put tensors at the rank's place."""
        return bool(self._put)

    def settle(self) -> None:
        """Let each element of the lists be what it is on every rank."""
        for put in self._put:
            if put.is_settled:
                continue
            put.is_settled = True
            given = put.items.pop()
            if given is put.before[0]:
                continue
            for at, item in enumerate(put.before):
                is_own = self.looked_up([float(at == rank) for rank in range(self._size)]).bool()
                put.after[id(item)] = torch.where(is_own, given, item)
                if put.items[at] is item:
                    put.items[at] = put.after[id(item)]

    def settled(self, arguments: Arguments) -> Arguments:
        """Return arguments with what the elements of lists have become."""
        after = {key: x for put in self._put for key, x in put.after.items()}
        if all(id(x) not in after for x in pytree.tree_leaves(arguments)):
            return arguments
        settled: Arguments = pytree.tree_map_only(Tensor, lambda x: after.get(id(x), x), arguments)
        return settled


_PLACING: Final[frozenset[object]] = frozenset(
    (
        *(torch.arange, torch.full, torch.narrow, torch.roll, torch.select),
        *(Tensor.__getitem__, Tensor.__setitem__, Tensor.narrow, Tensor.roll, Tensor.select),
    )
)


def _leaves(arguments: object) -> Iterator[object]:
    match arguments:
        case tuple() | list():
            for each in arguments:
                yield from _leaves(each)
        case slice():
            yield from (arguments.start, arguments.stop, arguments.step)
        case _:
            yield arguments


def _plain(arguments: Any) -> Any:  # noqa: ANN401 - of any function
    """Return arguments with the present values of numbers."""
    match arguments:
        case FollowedNumber():
            return arguments.compute()
        case tuple() | list():
            return type(arguments)(map(_plain, arguments))
        case slice():
            return slice(*map(_plain, (arguments.start, arguments.stop, arguments.step)))
        case _:
            return arguments


class _Put:
    """A list whose place of the rank is open: its elements ``before``, kept alive, and what each is ``after``."""

    def __init__(self, items: list[Tensor], before: list[Tensor]) -> None:
        self.items, self.before = items, before
        self.after: dict[int, Tensor] = {}
        self.is_settled = False


class _RankNumbers(FollowedNumbers):
    """The rank as a number: where it or a function of it meets a tensor, it is looked up by the rank."""

    def __init__(self, ranks: TracedRanks) -> None:
        super().__init__({"rank": 0})
        self._ranks = ranks

    def tensor(self, number: FollowedNumber) -> Tensor | None:
        """Return the number as a tensor, f64[]."""
        table: list[int | float] = []
        for rank in range(self._ranks.size):
            self.values["rank"] = rank
            value = number.compute()
            assert isinstance(value, int | float)
            table.append(value)
        self.values["rank"] = 0
        return self._ranks.looked_up(table)

    def answer(self, text: str, _: Callable[[], object]) -> object:
        """Let the rank be the place in a list where code stores a tensor; no program can answer anything else.

        Raises:
            CollectiveError: for other uses.
        """
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_code.co_filename in _OWN_FILES:
            caller = caller.f_back
        if text == "rank" and caller is not None and _is_storing(caller):
            return self._ranks.open_place()
        raise CollectiveError(
            f"decides by the rank ({text}), while a program is the same on every rank: compute with it in tensors"
        )


_OWN_FILES: Final = (__file__, FollowedNumber.__init__.__code__.co_filename)


def _is_storing(frame: FrameType) -> bool:
    opcode = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[opcode] == "STORE_SUBSCR"


# ------------------------------------------------------------------------------------------------ torch's functions


class WorldOfRanks:
    """Stands for torch's group of all ranks; ``real`` is that group, where the process is in one."""

    def __init__(self, ranks: Ranks, real: object) -> None:
        self._ranks, self.real = ranks, real

    def rank(self) -> object:
        """Return the rank, as ``torch.distributed.get_rank`` asks for it; 0 for torch's own logs."""
        return 0 if _is_for_torch() else self._ranks.rank()

    def size(self) -> int:
        """Return the number of ranks, as ``torch.distributed.get_world_size`` asks for it; 1 for torch's own logs."""
        return 1 if _is_for_torch() else self._ranks.size

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CollectiveError(f"calls torch.distributed.{_called(name)}, but {SUPPORTED}")


def _is_for_torch() -> bool:
    """Return whether torch itself called a function of ``torch.distributed``, as for a log, and not a model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        if frame.f_code is _LOGS:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _called(name: str) -> str:
    """Return the name of the function of torch that the code called, by default that of an attribute of the group."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        if not frame.f_code.co_name.startswith(("_", "wrapper")):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


_FOLDER: Final = f"{Path(dist.__file__).parent}{os.sep}"
_TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
_LOGS: Final = c10d_logger._get_msg_dict.__code__


@contextmanager
def ranks_seen(ranks: Ranks) -> Iterator[None]:
    """Let the code of a model see these ranks within the block."""
    before = dist.GroupMember.WORLD
    with ExitStack() as patches:
        for name, replacement in _replaced(ranks):
            module, _, attribute = name.rpartition(".")
            target = sys.modules.get(module)
            # Versions of torch differ in them.
            if hasattr(target, attribute):
                patches.enter_context(mock.patch.object(target, attribute, replacement))
        world = WorldOfRanks(ranks, before)
        known: dict[object, object] = c10d._world.pg_map  # type: ignore[assignment]
        known[world] = _NoBackend()
        dist.GroupMember.WORLD = world  # type: ignore[assignment]
        try:
            yield
        finally:
            dist.GroupMember.WORLD = before
            del known[world]


class _NoBackend:
    """Stands for the backend of the group, which a program does not have."""

    def __getitem__(self, _: int) -> object:
        if _is_for_torch():
            return "undefined"
        raise CollectiveError(f"calls torch.distributed.{_called('get_backend')}, but {SUPPORTED}")


def _replaced(ranks: Ranks) -> Iterator[tuple[str, object]]:
    """Yield what stands for attributes of modules of torch, which code calls by whatever name it imports."""
    differentiable, functional = (
        "torch.distributed.nn.functional",
        "torch.distributed._functional_collectives",
    )

    def gather(group: object, x: Tensor) -> tuple[Tensor, ...]:
        _require_all(group, "nn.functional.all_gather")
        return ranks.gathered(x).unbind()

    def concatenated(x: Tensor, gather_dim: int, group: object, _: str = "") -> Tensor:
        _require_all(group, "all_gather_tensor")
        return torch.cat(ranks.gathered(x).unbind(), gather_dim)

    def refusal(name: str) -> Function:
        def refuse(*_: object, **__: object) -> object:
            raise CollectiveError(f"calls torch.distributed.{name}, but {SUPPORTED}")

        return refuse

    for name, function in vars(sys.modules.get(differentiable, SimpleNamespace())).items():
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):
            apply = gather if name == "_AllGather" else refusal(f"nn.functional.{_snake(name)}")
            yield f"{differentiable}.{name}", SimpleNamespace(apply=apply)
    yield f"{differentiable}._not_supported_under_compile", _nothing
    yield f"{differentiable}._deprecated", _nothing

    def without_gradient(x: Tensor, *more: Any, **named: Any) -> Tensor:  # noqa: ANN401 - as above
        return concatenated(x.detach(), *more, **named)

    for name in ("all_gather_single", "all_gather_tensor"):
        yield f"{functional}.{name}_autograd", concatenated
        yield f"{functional}.{name}", without_gradient
    yield f"{c10d.__name__}._get_object_coll_device", _refuse_objects
    for name in ("all_reduce", "broadcast", "reduce_scatter_single", "all_to_all_single"):
        yield f"{functional}.{name}", refusal(name)


def _refuse_objects(_: object = None) -> object:
    raise CollectiveError(f"calls torch.distributed.{_called('send_object_list')}, but {SUPPORTED}")


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")


def _nothing(*_: object, **__: object) -> None:
    return None


def _require_all(group: object, name: str) -> None:
    world: object = dist.GroupMember.WORLD
    real = world.real if isinstance(world, WorldOfRanks) else None
    if group is not None and group is not world and group is not real:
        raise CollectiveError(
            f"calls torch.distributed.{name} for a group of its own, but {SUPPORTED}"
        )


_ON_TENSORS: Final[Mapping[object, str]] = {
    function: name
    for name, function in vars(c10d).items()
    if callable(function)
    and name in (*c10d.__all__, "_all_gather_base", "_reduce_scatter_base")
    and not isinstance(function, type)
}
"""Functions of torch.distributed by which code sends tensors, under torch's modes; and others, which no mode sees."""


def is_collective(function: Function) -> bool:
    """Return whether this is a function of ``torch.distributed``."""
    return function in _ON_TENSORS


def collective(
    function: Function, args: tuple[object, ...], kwargs: Mapping[str, object], ranks: Ranks | None
) -> object:
    """Return what a function of ``torch.distributed`` returns.

    Raises:
        CollectiveError: if no program has it, or there are no ``ranks``.
    """
    name = _ON_TENSORS[function]
    if ranks is None:
        raise CollectiveError(f"calls torch.distributed.{name}, but {_AS_IT_IS}")
    known = _KNOWN.get(name)
    if known is None:
        raise CollectiveError(f"calls torch.distributed.{name}, but {SUPPORTED}")
    return known(ranks, *args, **kwargs)


def _all_gather(
    ranks: Ranks,
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: object = None,
    async_op: bool = False,
) -> object:
    _require_all(group, "all_gather")
    pieces = ranks.gathered(tensor.detach()).unbind()
    if len(tensor_list) != len(pieces):
        raise CollectiveError(
            f"gathers the tensors of {len(pieces)} ranks into a list of {len(tensor_list)}"
        )
    for target, piece in zip(tensor_list, pieces, strict=True):
        _received(target, piece)
    if isinstance(ranks, TracedRanks):
        ranks.lists.append(tensor_list)
    return _Done() if async_op else None


def _all_gather_single(
    ranks: Ranks,
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: object = None,
    async_op: bool = False,
) -> object:
    _require_all(group, "all_gather_into_tensor")
    gathered = ranks.gathered(input_tensor.detach())
    if output_tensor.numel() != gathered.numel():
        raise CollectiveError(
            f"gathers {gathered.numel()} elements into a tensor of {output_tensor.numel()}"
        )
    _received(output_tensor, gathered.view(output_tensor.shape))
    return _Done() if async_op else None


def _received(target: Tensor, received: Tensor) -> None:
    if target.dtype != received.dtype or target.shape != received.shape:
        raise CollectiveError(
            f"gathers {received.dtype}{list(received.shape)} into {target.dtype}{list(target.shape)}"
        )
    with torch.no_grad():
        target.copy_(received)


class _Done:
    """A gather that is done, in the place of torch's ``Work``."""

    def wait(self, *_: object) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


_KNOWN: Final[Mapping[str, Function]] = {
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_gather_into_tensor": _all_gather_single,
    "_all_gather_base": _all_gather_single,
}
