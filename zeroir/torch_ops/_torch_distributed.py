"""Torch's functions of collectives, as a model's code finds them: the one module to adapt where torch changes them.

Code may have imported them by any name before, so they stay, and find a stand-in for the group of all ranks. Those with
tensors come to a mode of torch's functions; the differentiable ones call classes that are replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from zeroir.torch_ops.ranks import AS_IT_IS, CollectiveError, Ranks, TracedRanks

Function = Callable[..., object]

SUPPORTED: Final = (
    "a program has all_gather, all_gather_into_tensor, torch.distributed.nn.all_gather, get_rank and get_world_size "
    "over all ranks"
)


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
        raise CollectiveError(f"calls torch.distributed.{name}, but {AS_IT_IS}")
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
