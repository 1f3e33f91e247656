"""No parameter and no gradient of one is copied by an eager kernel: counted in torch's dispatcher during a step.

The exception has a name: torch makes the weight gradients of norms and convolutions in memory of its own, and has no
kernel that writes them elsewhere. Those are copied once. Kernels that Inductor generates have no such exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.stages import scheduled
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.comm.local import LocalComm
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.streams import ThreadStreams
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.eager import EagerKernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.initial_values import initialise

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten.clone.default, aten._to_copy.default, aten.cat.default)
FLAT_ROLES = (Role.PARAM, Role.GATHERED, Role.GRAD)
OWN_MEMORY = (
    aten.native_layer_norm_backward.default,
    torch.ops.zeroir.batch_norm_backward.default,
    aten.convolution_backward.default,
)


@dataclass
class Watch:
    """Copies of as many elements as a parameter has, to or from memory of flats, and calls seen in all.

    ``only_once`` are shapes of what was copied out of results of operators that have memory of their own.
    """

    program: Program
    memory: RankMemory
    copies: list[str] = field(default_factory=list)
    only_once: list[tuple[int, ...]] = field(default_factory=list)
    calls: int = 0
    results: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = {slot.numel for flat in self.program.flats for slot in flat.slots}
        self.flats = [b.name for b in self.program.buffers if b.role in FLAT_ROLES]

    def see(self, function: object, arguments: Sequence[object], result: object) -> None:
        self.calls += 1
        if function in OWN_MEMORY and isinstance(result, Sequence):
            self.results += [tensor for tensor in result[1:] if tensor is not None]
        if function not in COPIES:
            return
        for tensor in arguments:
            if not isinstance(tensor, Tensor) or tensor.numel() not in self.sizes:
                continue
            if self.is_flat(tensor) and not self.is_out_of_own_memory(arguments):
                self.copies.append(f"{function} of {list(tensor.shape)}")

    def is_out_of_own_memory(self, arguments: Sequence[object]) -> bool:
        """Whether this copies a result of an operator with memory of its own, for the first time."""
        for at, result in enumerate(self.results):
            if any(isinstance(a, Tensor) and a.data_ptr() == result.data_ptr() for a in arguments):
                self.only_once.append(tuple(self.results.pop(at).shape))
                return True
        return False

    def is_flat(self, tensor: Tensor) -> bool:
        live = [self.memory.buffer(name) for name in self.flats if self.memory.is_live(name)]
        start = tensor.data_ptr()
        return any(b.data_ptr() <= start < b.data_ptr() + b.nbytes for b in live)


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.watch.see(func, [*args, *(kwargs or {}).values()], result)
        return result


class WatchedKernels:
    """Eager kernels, each of which runs under the watch; with ``is_clumsy`` every weight gradient is copied."""

    compiles_dims = False

    def __init__(self, watch: Watch, *, is_clumsy: bool) -> None:
        self.inner, self.watch, self.is_clumsy = EagerKernels(CPU), watch, is_clumsy

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        kernel = self.inner.compile(segment, bindings)

        def run(arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
            with Mode(self.watch):
                kernel(arguments, destinations)
                for tensor in destinations if self.is_clumsy else ():
                    if tensor is not None:
                        tensor.copy_(tensor.clone())

        return run

    def at(self, values: Mapping[str, int]) -> WatchedKernels:
        del values
        return self

    def finish(self) -> None:
        self.inner.finish()


def watched(path: Path, stage: int, *, is_clumsy: bool = False) -> Watch:
    program = scheduled(path, stage, 1)
    model_file = load_model_file(str(path))
    memory = RankMemory(program, 0, CPU)
    watch = Watch(program, memory)
    kernels = WatchedKernels(watch, is_clumsy=is_clumsy)
    local_ranks = LocalRanks(program=program, memories=[memory], comm=LocalComm(), kernels=kernels)
    local_ranks.compile()
    initialise(program, [memory], model_file.model, 0)
    executor = StepExecutor(local_ranks, ThreadStreams())
    executor.step([[model_file.batch()]])
    executor.close()
    return watch


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in range(3)), 3])
@pytest.mark.parametrize(
    ("model", "dimensions"),
    [
        ("examples/gpt.py", {1}),
        pytest.param("tests/support/models/llama.py", set(), marks=pytest.mark.slow),
        pytest.param("tests/support/models/gpt2.py", {1}, marks=pytest.mark.slow),
        pytest.param("tests/support/models/convnet.py", {1, 4}, marks=pytest.mark.slow),
    ],
)
def test_no_parameter_is_copied(model: str, dimensions: set[int], stage: int) -> None:
    found = watched(ROOT / model, stage)
    assert found.calls > 100
    assert found.copies == []
    assert {len(shape) for shape in found.only_once} == dimensions


@pytest.mark.slow
def test_a_copy_is_seen() -> None:
    assert watched(ROOT / "examples" / "gpt.py", 3, is_clumsy=True).copies
