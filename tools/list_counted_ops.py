"""Write ``zeroir/ir/segments/counted_ops.txt`` and ``measured_ops.txt``: ops of torch by the memory that they take.

Torch's own tests have samples of its operators. The eager kernels run every op that these samples call, forward and
backward, while torch's allocator is watched: with the operands as they are, and with their dimensions in reverse order
in memory. The first list has the ops that took no more than ``zeroir.workspace.scratch`` counts. The second has those
that took at most as much more as a copy of every operand and result with 32 bits an element. Neither has the ops of
libraries that choose an algorithm for the CPU at hand; see ``zeroir.workspace.scratch.allowance``.

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
from zeroir.ir.segments.allowlist import listed_ops
from zeroir.ir.segments.views import is_view
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
"""Ops that torch's samples do not call; the tests of whole steps do."""

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
"""The most different calls of one op that are kept."""


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the calls of ops that a segment may name, with arguments that it may contain."""

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
    """Segments of one op, from the calls in at most ``samples`` samples of each ``every``-th operator and dtype."""
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
            returned = function(first, *args, **kwargs)
            results = [leaf for leaf in tree_leaves(returned) if _has_grad(leaf)]
            sources = [leaf for leaf in tree_leaves(operands) if _has_grad(leaf)]
            if results and sources:
                ones = [torch.ones_like(result) for result in results]
                torch.autograd.grad(results, sources, ones, allow_unused=True)

        yield run


def _has_grad(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _cases(op: str, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> Iterator[Case]:
    """The call as a segment, and with the dimensions of its operands in reverse order in memory."""
    reversed_args = cast("tuple[Argument, ...]", tree_map(_reversed, args))
    for operands in (args, reversed_args):
        with suppress(Exception):  # torch refuses, or returns a dtype that no segment may have
            segment, tensors = segment_of(op, *operands, **kwargs)
            case = Case(segment=segment, outputs=unwanted(segment), tensors=tensors)
            case.prepared()()
            yield case


def _reversed(leaf: object) -> object:
    """The tensor with its dimensions in reverse order in memory."""
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    order = tuple(reversed(range(leaf.dim())))
    return leaf.permute(order).contiguous().permute(order)


def sorted_out(cases: list[Case]) -> tuple[set[str], set[str]]:
    """The ops that took only counted memory in all these cases, and those that took at most the allowance beside it."""
    ops: set[str] = set()
    uncounted: set[str] = set()
    unbounded: set[str] = set()
    for case, measured in zip(cases, taken(cases), strict=True):
        (node,) = case.segment.nodes
        ops.add(node.op)
        counted_bytes = eager_workspace(case.segment, case.outputs).counted_bytes
        excess_bytes = measured.peak_bytes - counted_bytes
        if excess_bytes > 0:
            uncounted.add(node.op)
        if excess_bytes > copied_bytes(node, case.segment.types()) + FIXED_BYTES:
            unbounded.add(node.op)
    torchs_own = {
        op
        for op in ops - PRODUCTS - CONVOLUTIONS - ATTENTION
        if not LIBRARY.fullmatch(op.rpartition(".")[0])
    }
    return (torchs_own - uncounted) | BY_STEPS, ((torchs_own & uncounted) - unbounded) | BY_FORMULAS


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
