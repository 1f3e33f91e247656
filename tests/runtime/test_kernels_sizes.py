"""Inductor compiles each segment once for all sizes of the batches, and the code is right for every one of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zeroir
from examples import any_length
from tests.memory.nodes import bound, segment_of
from tests.runtime.support import ROOT, Ranks, require_success
from tests.support.models import operators
from zeroir.api.checks.drawn_batches import batch_of_sizes, drawn_sizes
from zeroir.api.model_of_program import load_model
from zeroir.errors import KernelWarning
from zeroir.ir import ops
from zeroir.ir.analysis.instances import instance, largest, smallest, with_other_integers
from zeroir.ir.buffers import span_numel
from zeroir.ir.segments.bindings import bindings
from zeroir.ir.segments.segment import TensorType
from zeroir.ir.sizes import Dim
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings, reason_without_graphs
from zeroir.runtime.kernels import _inductor_libraries as libraries
from zeroir.runtime.kernels import _inductor_private as private
from zeroir.runtime.kernels import graph
from zeroir.runtime.kernels.cache import kernel_key
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.kernels.compile_worker import Request, packed, unpacked
from zeroir.runtime.kernels.decompositions import decompositions
from zeroir.runtime.kernels.eager import EagerKernels
from zeroir.runtime.kernels.inductor import InductorKernels
from zeroir.torch_ops.types import TORCH_DTYPE

CPU = torch.device("cpu")
MODELS: Mapping[str, tuple[Path, str | None]] = {
    "gpt": (Path(any_length.__file__), None),
    "llama": (
        ROOT / "tests" / "support" / "models" / "llama.py",
        "input_ids: rows<=4, 2<=length<=16; labels: rows, length",
    ),
    "bert": (
        ROOT / "tests" / "support" / "models" / "bert.py",
        "input_ids: rows<=4, 2<=length<=16; attention_mask: rows, length; labels: rows, length",
    ),
}


def written(cache: Path) -> dict[Path, int]:
    """The compiled code in a cache, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("kernel.so")}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A cache of kernels of each model; ranks that train one of them find its kernels."""
    return {name: tmp_path_factory.mktemp(name) for name in MODELS}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("kept_compilers")
@pytest.mark.parametrize("name", MODELS)
def test_each_segment_is_compiled_once_for_all_shapes(
    name: str, caches: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = caches[name]
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(cache))
    path, shapes = MODELS[name]
    # The segments of an evaluation are compiled for one model; they are parts of what a step computes.
    compiled = zeroir.compile(path, stage=3, world_size=1, shapes=shapes, evaluate=name == "gpt")
    program = compiled.program
    model_file = load_model(compiled.artifact, compiled.path)
    chance = torch.Generator().manual_seed(0)
    batches = [
        batch_of_sizes(program, model_file.batch(), sizes, chance)
        for sizes in islice(drawn_sizes(program, 0, seed=1), 7)
    ]
    losses: dict[KernelBackend, list[float]] = {}
    entries: dict[Path, int] = {}
    for backend in KernelBackend:
        with warnings.catch_warnings():
            warnings.simplefilter("error", KernelWarning)
            engine = Engine(program, EngineSettings(kernels=backend, self_check=True))
        entries = written(cache)
        engine.initialise(load_model(compiled.artifact, compiled.path).model, seed=0)
        losses[backend] = [engine.step(batch).loss for batch in batches]
        engine.close()
    assert losses[KernelBackend.INDUCTOR] == pytest.approx(losses[KernelBackend.EAGER], rel=1e-5)
    distinct = {
        (program.segment_by_name[op.segment].digest(), tuple(bindings(op)))
        for op in program.ops()
        if isinstance(op, ops.Compute)
    }
    assert len(entries) == len(distinct)
    assert written(cache) == entries


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_ranks_run_the_same_kernels_at_their_own_shapes(
    tmp_path: Path, caches: Mapping[str, Path]
) -> None:
    environment = {"ZEROIR_CACHE_DIR": str(caches["gpt"])}
    ranks = Ranks(2, tmp_path, "sized-kernels", environment=environment)
    require_success(ranks.wait(timeout_s=1700))
    for rank in range(2):
        found = json.loads((tmp_path / f"sized.{rank}.json").read_text())
        assert found["inductor"] == pytest.approx(found["eager"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_for_some_sizes_alone_is_refused() -> None:
    from zeroir.runtime.kernels._inductor_sizes import SizesError, Symbols

    dims = [Dim(name=name, minimum=1, maximum=8) for name in ("length", "rows")]
    symbols = Symbols(dims)
    length, rows = symbols.of([dim.size for dim in dims])
    assert length > 0
    assert length * 2 <= 16
    assert (length - 1) // 2 + 1 == (length + 1) // 2
    # These say that a size is not 1.
    assert length != 1
    assert length - 1 != 1
    assert length * rows >= 2
    assert 3 * length > 3
    assert length < length * rows
    symbols.require_right_for_all()
    assert length > 5
    with pytest.raises(SizesError, match=r"only where length > 5\."):
        symbols.require_right_for_all()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_integers_wrap_around_in_compiled_code(tmp_path: Path) -> None:
    """The hash of a position overflows; to C++ that is undefined, and ends loops of unknown length early."""
    dim = Dim(name="length", minimum=1, maximum=64)
    x, seed = torch.randn(64, 16), torch.tensor([3])
    whole, _ = segment_of("zeroir.dropout.default", x, 0.5, seed)
    of_sizes = with_other_integers(whole, lambda size: dim.size if size == 64 else size)
    how = bound(of_sizes)
    private.compile_library(
        graph.build_graph(of_sizes, how, CPU),
        graph.input_types(of_sizes, how),
        decompositions(CPU),
        tmp_path,
        CPU,
        host_inputs=graph.host_inputs(of_sizes),
        dims=graph.kernel_dims(of_sizes, how),
    )
    library = libraries.load_library(tmp_path, CPU)
    for length in (1, 5, 64):
        own = x[:length]
        filled = [torch.zeros(length, 16), torch.zeros(length, 16, dtype=torch.bool)]
        library([torch.empty(()).expand(length), own, seed, *filled])
        assert all(map(torch.equal, filled, torch.ops.zeroir.dropout(own, 0.5, seed)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("kept_compilers")
def test_compiled_code_calls_an_operator_of_the_model_for_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that compiles does not know it. An eager kernel that takes over would warn."""
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path))
    dim = Dim(name="rows", minimum=1, maximum=7)
    x = torch.randn(7, 3)
    name = str(operators.power._opoverload)
    whole, _ = segment_of(name, x, [1, 2], 0.5, way="mean")
    segment = with_other_integers(whole, lambda number: dim.size if number == 7 else number)
    kernels = InductorKernels(CPU)
    kernels.compile(segment, bound(segment))
    kernels.finish()
    for rows in (1, 4, 7):
        of_rows, _ = segment_of(name, x[:rows], [1, 2], 0.5, way="mean")
        results = [torch.zeros(rows, 3), torch.zeros(())]
        kernels.at({"rows": rows}).compile(of_rows, bound(of_rows))([x[:rows]], results)
        assert all(map(torch.equal, results, operators.power(x[:rows], [1, 2], 0.5, way="mean")))


# --------------------------------------------------------------------------------------- without compiling


def tensor_of(kind: TensorType) -> Tensor:
    """Random numbers of a type, or zeros where it is one of integers."""
    tensor = (
        torch.zeros(()).to(TORCH_DTYPE[kind.dtype]).new_zeros(span_numel(kind.shape, kind.stride))
    )
    if kind.dtype.is_floating:
        tensor.uniform_()
    return tensor.as_strided(kind.shape, kind.stride)


@pytest.mark.slow
def test_the_graph_of_a_segment_is_right_for_every_shape() -> None:
    """Each segment of a program, by the graph alone, beside eager kernels for the smallest and the largest shape."""
    program = zeroir.compile(any_length.__file__, stage=3, world_size=1).program
    checked = 0
    for values in (smallest(program), largest(program)):
        own = instance(program, values)
        for op, of_shape in zip(program.ops(), own.ops(), strict=True):
            if not isinstance(op, ops.Compute) or not isinstance(of_shape, ops.Compute):
                continue
            segment, how = program.segment_by_name[op.segment], bindings(op)
            plain = own.segment_by_name[op.segment]
            tensors = [tensor_of(kind) for kind in graph.input_types(plain, bindings(of_shape))]
            arguments, filled = tensors[: len(segment.inputs)], tensors[len(segment.inputs) :]
            expected = [tensor.clone() for tensor in filled]
            shape = [values[dim.name] for dim in graph.kernel_dims(segment, how)]
            leading = [torch.empty(()).expand(shape)] if shape else []
            graph.build_graph(segment, how, CPU)(*leading, *arguments, *filled)
            outputs = graph.graph_outputs(how)
            targets: list[Tensor | None] = [None] * len(how)
            for output, tensor in zip((*outputs.direct, *outputs.scratch), expected, strict=True):
                targets[output] = tensor
            EagerKernels(CPU).compile(plain, bindings(of_shape))(arguments, targets)
            for tensor, wanted in zip(filled, expected, strict=True):
                torch.testing.assert_close(tensor, wanted)
            checked += 1
    assert checked >= 12


def test_another_range_of_a_dim_is_another_kernel() -> None:
    whole, _ = segment_of("aten.exp.default", torch.randn(8, 3))
    keys: set[str] = set()
    for minimum, maximum in ((1, 8), (2, 8), (1, 9), (1, 8)):
        size = Dim(name="rows", minimum=minimum, maximum=maximum).size
        segment = with_other_integers(whole, lambda number: size if number == 8 else number)  # noqa: B023
        keys.add(kernel_key(segment, bound(segment), CPU, 1))
    assert len(keys) == 3


def test_a_request_keeps_its_sizes_on_the_way() -> None:
    dim = Dim(name="rows", minimum=1, maximum=8)
    whole, _ = segment_of("aten.exp.default", torch.randn(8, 3))
    segment = with_other_integers(whole, lambda number: dim.size if number == 8 else number)
    request = Request(
        segment=segment,
        operators=(),
        bindings=tuple(bound(segment)),
        device="cpu",
        threads=1,
        folder="somewhere",
        dims=(dim,),
    )
    assert unpacked(packed(request)) == request


@pytest.mark.slow
def test_why_no_section_is_a_graph() -> None:
    sized = zeroir.compile(any_length.__file__).program
    cuda = torch.device("cuda", 0)
    assert (
        reason_without_graphs(sized, cuda)
        == "A CUDA graph is for one shape, and the program is for many"
    )
    assert reason_without_graphs(instance(sized, largest(sized)), cuda) is None
    assert reason_without_graphs(sized, CPU) == "There are no CUDA graphs on the device cpu"
