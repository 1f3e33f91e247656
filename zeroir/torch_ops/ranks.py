"""The ranks of a job as a model's code sees them: their number, the own rank, and the tensors of all of them.

While a model is traced no process group exists, and one process stands for all ranks. So torch's functions find a
stand-in for the group of all ranks, and a gather is an operator that a program turns into a collective. What depends
on the rank is looked up in a table by the rank, an input of the traced function, so that one program is that of every
rank. Eager replicas have an implementation of their own (``replica_ranks``).
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, Protocol, TypeVar, cast

import torch
from torch import Tensor
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

AS_IT_IS: Final = "code that runs as it is must not depend on other ranks"


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
            raise CollectiveError(f"asks for the ranks, but {AS_IT_IS}")
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
