"""What the runtime uses of Inductor's internals; when a new torch changes them, these tests say so and name it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.runtime.support import ROOT, embedding_gradient
from tests.support.programs import mlp
from zeroir.ir.ops import Compute, Mode
from zeroir.ir.segments.bindings import bindings
from zeroir.runtime.kernels import _inductor_libraries as libraries
from zeroir.runtime.kernels import _inductor_private as private
from zeroir.runtime.kernels import graph
from zeroir.runtime.kernels.decompositions import decompositions

T = TypeVar("T")
CPU = torch.device("cpu")
DIM = 96


def attempt(step: Callable[[], T]) -> T:
    """Run a step of the private interface; a failure names the torch that changed it."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whatever a new torch raises
        pytest.fail(f"torch {torch.__version__} changed what the kernels rely on: {error!r}")


def test_tensors_become_handles() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    handles = attempt(lambda: torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors))
    assert all(libraries._pointer(handle, None) for handle in handles)
    back = [torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(handle) for handle in handles]
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(back, tensors, strict=True))


@pytest.mark.slow
def test_loading_needs_no_compiler() -> None:
    code = (
        "import sys, zeroir.runtime.kernels.inductor\n"
        "sys.exit(any(m.startswith(('torch._inductor', 'torch._dynamo')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that compiles, and what Inductor warns of."""
    marks = [
        pytest.mark.slow,
        pytest.mark.timeout(900),
        pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        pytest.mark.filterwarnings("ignore::FutureWarning"),
    ]
    for mark in marks:
        test = mark(test)
    return test


@compiles
def test_a_gpus_kernels_are_compiled_once_and_their_binaries_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx, config
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: list[bool] = []

    def look(*_: object, **__: object) -> None:
        found.append(config.triton.store_cubin)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", look)
    nothing = torch.fx.symbolic_trace(torch.nn.Identity())
    private._compile(nothing, [], FakeTensorMode(), tmp_path, {})
    assert found == [True]


@compiles
def test_a_segment_is_compiled_to_one_library_without_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight's gradient is made by the product in the destination."""
    program = mlp(dim=96, features=64, batch=32)
    op = next(
        op for op in program.ops() if isinstance(op, Compute) and op.segment == "block.backward"
    )
    segment, how = program.segment_by_name[op.segment], bindings(op)
    wrappers: list[str] = []
    keep = private._keep_only

    def read_first(folder: Path, *names: str) -> None:
        wrappers.extend(path.read_text() for path in folder.glob("*.wrapper.cpp"))
        keep(folder, *names)

    monkeypatch.setattr(private, "_keep_only", read_first)
    kinds = graph.input_types(segment, how)
    built = graph.build_graph(segment, how, CPU)
    attempt(lambda: private.compile_library(built, kinds, decompositions(CPU), tmp_path, CPU))
    (wrapper,) = wrappers
    assert "aoti_torch_cpu_mm_out(arg" in wrapper
    assert "AOTInductorModelContainer" not in wrapper, "the container is compiled with the segment"
    assert sorted(path.name for path in tmp_path.iterdir()) == [libraries.LIBRARY]
    assert hasattr(ctypes.CDLL(str(tmp_path / libraries.LIBRARY)), "zeroir_run")


@compiles
def test_what_does_not_compile_as_a_function_is_a_model_with_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the operator that only the function calls by itself: a model asks torch to look it up."""
    segment, how = embedding_gradient(Mode.WRITE, padding=2)
    kinds = graph.input_types(segment, how)
    arguments = [torch.randn(3, 4, 5), torch.randint(0, 6, (3, 4))]
    found: list[torch.Tensor] = []
    files: list[list[str]] = []

    def run(folder: Path) -> None:
        folder.mkdir()
        built = graph.build_graph(segment, how, CPU)
        attempt(lambda: private.compile_library(built, kinds, decompositions(CPU), folder, CPU))
        destination = torch.randn(6, 5)
        library = attempt(lambda: libraries.load_library(folder, CPU))
        library([*arguments, destination])
        found.append(destination)
        files.append(sorted(path.name for path in folder.iterdir()))

    run(tmp_path / "function")
    with monkeypatch.context() as patch:
        patch.setattr(private, "_SEGMENT_HEADER", Path(__file__))  # it is no C++
        run(tmp_path / "model")
    expected = torch.ops.aten.embedding_dense_backward(*arguments, 6, 2, False)
    assert all(torch.equal(one, expected) for one in found)
    assert files == [[libraries.LIBRARY], [libraries.EXTERN_CALLS, libraries.LIBRARY]]


@compiles
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there is the question put")
def test_instructions_that_the_compiler_knows_pass_inductors_own_check() -> None:
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list

    with private._quick_check_of_instructions():
        found = attempt(valid_vec_isa_list)
        assert all(one.check_build(VecISA._avx_code) for one in found)
        unknown = VecISA()
        unknown._arch_flags = "-mno-such-instructions"
        assert not unknown.check_build(VecISA._avx_code)
    assert all(one.check_build(VecISA._avx_code) for one in found)
