"""Write ``zeroir/ir/counted_ops.txt`` and ``measured_ops.txt``: the memory that torch's ops take.

Every op of torch that the samples of its own tests call, forward and backward, is carried out by the eager kernels
while torch's allocator is watched, with operands as they are and with their dimensions the other way round in memory.
The first list has the ops that took no more than ``zeroir.workspace.scratch`` counts, the second those that took no
more beside it than every operand and result once more with 32 bits an element. What libraries compute as the CPU likes
it is in neither; see ``zeroir.workspace.scratch.allowance``.

    python -m tools.list_counted_ops         write the files
"""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.memory.nodes import Argument, Case, segment_of, taken, unwanted
from tools import torch_samples
from tools.list_aten_ops import FOLDER, PATH, write
from zeroir.ir.op_lists import listed_ops
from zeroir.ir.views import is_view
from zeroir.workspace.scratch.allowance import ATTENTION, CONVOLUTIONS, PRODUCTS, copied_bytes
from zeroir.workspace.segments import eager_workspace

COUNTED_PATH: Final = FOLDER / "counted_ops.txt"
MEASURED_PATH: Final = FOLDER / "measured_ops.txt"
COUNTED: Final = "The ops of torch that take no more memory than the memory model counts, as `namespace.op: overloads`"
MEASURED: Final = (
    "The ops of torch that take no more beside what is counted than all their tensors once more"
)

LIBRARY: Final = re.compile(
    r"aten\.(_?linalg_.*|_?cholesky.*|_?lu_.*|.*qrf?|svd|.*eigh?|.*inverse|triangular_.*|lstsq|_?fft_.*|.*conv.*|.*cdist.*)"
)
BY_STEPS: Final = frozenset({"aten.copy.default", "aten.fill.Tensor"})
"""What torch's samples do not call; the tests of whole steps do."""

BY_FORMULAS: Final = frozenset(
    {"aten.scatter.value", "aten.sort.default"}
    | {
        f"aten.upsample_{way}.vec"
        for way in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "bicubic2d", "trilinear3d")
    }
)
"""Overloads that only programs call; the tests of the formulas do."""

FIXED_BYTES: Final = 1024
"""Numbers and tables of small samples, for which the allowance has some slack."""

DTYPES: Final = (torch.float32, torch.bfloat16, torch.int64)
PLACES: Final = frozenset({"device", "layout", "pin_memory", "memory_format"})
MOST_CALLS: Final = 60
"""So many different calls of one op are enough."""


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the calls of ops that a segment may name, whose arguments it can have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_key: dict[str, tuple[str, tuple[Argument, ...], dict[str, Argument]]] = {}
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name, named = str(func), {k: v for k, v in (kwargs or {}).items() if k not in PLACES}
        leaves = tree_leaves((args, named))
        if name in listed_ops(PATH.name) and not is_view(name) and all(map(_is_plain, leaves)):
            key = f"{name} {[_shown(leaf) for leaf in leaves]}"
            if key not in self.by_key and self._counts[name] < MOST_CALLS:
                self._counts[name] += 1
                self.by_key[key] = (
                    name,
                    cast("tuple[Argument, ...]", tree_map(_detached, args)),
                    cast("dict[str, Argument]", tree_map(_detached, named)),
                )
        return result


def _is_plain(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout == torch.strided and not leaf.is_complex()
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype))


def _shown(leaf: object) -> object:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def sampled_cases(samples: int, *, every: int = 1) -> list[Case]:
    """Segments of one op: the calls in so many samples for every dtype of each ``every``-th operator of torch."""
    calls = _Calls()
    for info, dtype in itertools.product(torch_samples.operators()[::every], DTYPES):
        if dtype in info.supported_dtypes("cpu"):
            is_differentiable = info.supports_autograd and dtype.is_floating_point
            for run in itertools.islice(_runs(info, dtype, is_differentiable), samples):
                # Torch refuses some of its samples here, with errors of many kinds.
                with suppress(Exception), calls:
                    run()
    return [case for op, args, kwargs in calls.by_key.values() for case in _cases(op, args, kwargs)]


def _runs(
    info: object, dtype: torch.dtype, is_differentiable: bool
) -> Iterator[Callable[[], None]]:
    function = cast("Callable[..., object]", info)
    samples = info.sample_inputs("cpu", dtype, requires_grad=is_differentiable)  # type: ignore[attr-defined]
    for sample in samples:
        operands = (sample.input, sample.args, sample.kwargs)

        def run(
            operands: tuple[object, tuple[object, ...], Mapping[str, object]] = operands,
        ) -> None:
            first, args, kwargs = operands
            results = [
                one for one in tree_leaves(function(first, *args, **kwargs)) if _has_grad(one)
            ]
            sources = [one for one in tree_leaves(operands) if _has_grad(one)]
            if results and sources:
                ones = [torch.ones_like(one) for one in results]
                torch.autograd.grad(results, sources, ones, allow_unused=True)

        yield run


def _has_grad(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _cases(op: str, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> Iterator[Case]:
    """The call as a segment, and with operands that lie the other way round."""
    turned = cast("tuple[Argument, ...]", tree_map(_turned, args))
    for operands in (args, turned):
        with suppress(Exception):  # torch refuses, or has results of dtypes that no segment knows
            segment, tensors = segment_of(op, *operands, **kwargs)
            case = Case(segment=segment, outputs=unwanted(segment), tensors=tensors)
            case.prepared()()
            yield case


def _turned(leaf: object) -> object:
    """The tensor with its dimensions the other way round in memory."""
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    order = tuple(reversed(range(leaf.dim())))
    return leaf.permute(order).contiguous().permute(order)


def sorted_out(cases: list[Case]) -> tuple[set[str], set[str]]:
    """The ops that are counted, and those of which something is known, by what they took in all of these cases."""
    seen: set[str] = set()
    beyond: set[str] = set()
    wild: set[str] = set()
    for case, found in zip(cases, taken(cases), strict=True):
        (node,) = case.segment.nodes
        more = found.peak_bytes - eager_workspace(case.segment, case.outputs).counted_bytes
        seen.add(node.op)
        beyond |= {node.op} if more > 0 else set()
        is_wild = more > copied_bytes(node, case.segment.types()) + FIXED_BYTES
        wild |= {node.op} if is_wild else set()
    known = {
        op
        for op in seen - PRODUCTS - CONVOLUTIONS - ATTENTION
        if not LIBRARY.fullmatch(op.rpartition(".")[0])
    }
    return (known - beyond) | BY_STEPS, ((known & beyond) - wild) | BY_FORMULAS


def main() -> int:
    """Write the files."""
    warnings.simplefilter("ignore")
    counted, measured = sorted_out(sampled_cases(4))
    write(COUNTED_PATH, "list_counted_ops", COUNTED, counted)
    write(MEASURED_PATH, "list_counted_ops", MEASURED, measured)
    print(f"{len(counted)} overloads are counted, {len(measured)} are measured.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
