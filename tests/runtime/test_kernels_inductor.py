"""Compiled segments compute what the eager kernels do, are made once, and are loaded without the compiler.

Compiling takes seconds a segment, so the tests of one model share a cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zeroir
from tests.memory.nodes import bound, segment_of
from tests.runtime.support import (
    ROOT,
    Ranks,
    begun,
    initial_flats,
    lowered,
    random_batches,
    require_success,
)
from tests.support.lockstep import run_lockstep
from tests.support.models import operators
from tests.support.programs import mlp
from tests.support.recorded_calls import RecordingKernels, copies
from tests.support.zygote import second_zygote
from zeroir.api.model_of_program import load_model
from zeroir.api.running.engines import kernel_backend
from zeroir.artifact.cache_folder import cache_folder
from zeroir.config import FloatName
from zeroir.errors import KernelWarning, UserError
from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Binding
from zeroir.runtime.engine import opened_program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.kernels import compile_pool, inductor
from zeroir.runtime.kernels.cache import KernelCache, kernel_key
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.kernels.differences import tolerance
from zeroir.runtime.kernels.inductor import InductorKernels

CPU = torch.device("cpu")
MODELS: Mapping[str, tuple[Path, FloatName]] = {
    "example": (ROOT / "examples" / "gpt.py", "fp32"),
    "llama": (ROOT / "tests" / "support" / "models" / "llama.py", "bf16"),
    "convnet": (ROOT / "tests" / "support" / "models" / "convnet.py", "fp32"),
}
LOSS_BOUND = {"fp32": 1e-5, "bf16": 2**-6}
"""Relative differences of losses in a few steps: in FP32 what an optimizer that looks at signs makes of roundings, in
bf16 a few roundings."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, kept_compilers: None) -> Iterator[Path]:
    """A cache of compiled segments for the tests of this module."""
    assert kept_compilers is None
    given = os.environ.get("ZEROIR_TEST_KERNEL_CACHE")
    folder = Path(given) if given else tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROIR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def ranks_cache(cache: Path) -> Iterator[Path]:
    """One that is empty until ranks leave in it what the tests after theirs use."""
    folder = cache / "ranks"
    shutil.rmtree(folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROIR_CACHE_DIR", str(folder))
        yield folder


def open_engine(compiled: zeroir.CompiledProgram, kernels: KernelBackend) -> Engine:
    engine = Engine(compiled.program, EngineSettings(kernels=kernels))
    engine.initialise(load_model(compiled.artifact, compiled.path).model, seed=0)
    return engine


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", MODELS)
def test_every_segment_and_whole_steps_agree_with_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, precision = MODELS[name]
    # The segments of an evaluation are compiled for one model; they are parts of what a step computes.
    is_evaluated = name == "convnet"
    compiled = zeroir.compile(
        path, stage=3, world_size=1, precision=precision, evaluate=is_evaluated
    )
    model_file = load_model(compiled.artifact, compiled.path)
    batch = model_file.batch()
    recording = RecordingKernels()
    with monkeypatch.context() as patch:
        patch.setattr(opened_program, "open_kernels", lambda *_: recording)
        engine = open_engine(compiled, KernelBackend.EAGER)
        losses = [engine.step(batch).loss for _ in range(4)]
        engine.close()

    inductor = InductorKernels(CPU)
    kernels = [inductor.compile(call.segment, call.bindings) for call in recording.calls]
    inductor.finish()
    assert len(kernels) >= 4
    for call, kernel in zip(recording.calls, kernels, strict=True):
        destinations = copies(call.before)
        kernel(call.arguments, destinations)
        bound = tolerance(call.segment)
        for found, expected in zip(destinations, call.after, strict=True):
            if found is None or expected is None:
                continue
            difference = (found.double() - expected.double()).abs().max()
            largest = expected.double().abs().max()
            assert difference <= bound * largest, (call.segment.name, found.shape, bound)

    engine = open_engine(compiled, KernelBackend.INDUCTOR)
    found_losses = [engine.step(batch).loss for _ in range(4)]
    engine.close()
    assert found_losses == pytest.approx(losses, rel=LOSS_BOUND[precision])
    assert found_losses[-1] < found_losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_compiled_code_calls_an_operator_of_the_model() -> None:
    """The process that compiles does not know it. An eager kernel that takes over would warn."""
    x = torch.randn(2, 3)
    name = str(operators.power._opoverload)
    segment, arguments = segment_of(name, x, [1, 2], 0.5, way="mean")
    kernels = InductorKernels(CPU)
    kernel = kernels.compile(segment, bound(segment))
    kernels.finish()
    results = [torch.zeros(2, 3), torch.zeros(())]
    kernel(arguments, results)
    assert all(map(torch.equal, results, operators.power(x, [1, 2], 0.5, way="mean")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_function_calls_operators_whose_arguments_are_tensors_and_numbers(cache: Path) -> None:
    """Where they are others, such as lists, Inductor calls them through a container."""
    before = set(cache.rglob("kernel.json"))
    x, bias = torch.randn(2, 3), torch.randn(3)
    arguments = (x, bias, None, True, 3, 0.25, None, 0.5)
    segment, tensors = segment_of(str(operators.mixed._opoverload), *arguments)
    kernels = InductorKernels(CPU)
    kernel = kernels.compile(segment, bound(segment))
    kernels.finish()
    results = [torch.zeros(2, 3), torch.zeros(())]
    kernel(tensors, results)
    assert all(map(torch.equal, results, operators.mixed(*arguments)))
    assert set(cache.rglob("kernel.json")) == before


TOLERANT_STEPS = 3
LOADING = """
import sys, json, torch
import tests.runtime.test_kernels_inductor as here
engine = here.mlp_engine(here.KernelBackend.INDUCTOR)
losses = [engine.step(batch).loss for ((batch,),) in here.random_batches(here.TOLERANT_STEPS, 1)]
engine.close()
compiler = [m for m in sys.modules if m.startswith(("torch._inductor", "torch._dynamo"))]
print(json.dumps({"losses": losses, "compiler": compiler}))
"""


def mlp_engine(kernels: KernelBackend) -> Engine:
    program = lowered(mlp(clip=0.5), 3, 1)
    return begun(Engine(program, EngineSettings(kernels=kernels)))


def mlp_losses(kernels: KernelBackend) -> list[float]:
    engine = mlp_engine(kernels)
    losses = [engine.step(batch).loss for ((batch,),) in random_batches(TOLERANT_STEPS, 1)]
    engine.close()
    return losses


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_two_ranks_share_the_work_which_others_need_not_do_again(
    tmp_path: Path, ranks_cache: Path
) -> None:
    """Two processes start with nothing: each segment is compiled by one of them, elsewhere, and run by both.

    A process that comes later uses the entries that they leave as they are, and imports no compiler either.
    """
    assert not written(ranks_cache)
    # The ranks come of a process that has not imported the compiler.
    environment = {"ZEROIR_CACHE_DIR": str(ranks_cache)}
    ranks = Ranks(2, tmp_path, "kernels", environment=environment, sources=(second_zygote,))
    require_success(ranks.wait(timeout_s=800))
    for rank in range(2):
        found = json.loads((tmp_path / f"kernels.{rank}.json").read_text())
        assert found["compiler"] == []
        assert found["inductor"] == pytest.approx(found["eager"], rel=1e-5)
    entries = written(ranks_cache)
    assert entries

    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADING],
        cwd=ROOT,
        env={**os.environ, "ZEROIR_CACHE_DIR": str(ranks_cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["compiler"] == []
    assert found["losses"] == pytest.approx(mlp_losses(KernelBackend.EAGER), rel=1e-5)
    assert written(ranks_cache) == entries
    assert not list(ranks_cache.rglob("draft-*"))


def written(cache: Path) -> dict[Path, int]:
    """The compiled code in a cache, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("kernel.so")}


def test_a_worker_starts_no_processes_for_a_gpus_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor reads from the environment how many compile for it: as many as the host has cores, unless told."""
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    environment = b""
    with compile_pool._start() as worker:
        while not environment and worker.poll() is None:  # it is there a moment after the process
            environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
        worker.kill()
    assert b"TORCHINDUCTOR_COMPILE_THREADS=1" in environment.split(b"\0")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_damaged_entry_is_compiled_again(
    ranks_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp_losses(KernelBackend.INDUCTOR)
    used: list[Path] = []
    find = KernelCache.find

    def noted(self: KernelCache, key: str) -> Path | None:
        entry = find(self, key)
        used.extend([] if entry is None else [entry])
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(KernelCache, "find", noted)
        expected = mlp_losses(KernelBackend.INDUCTOR)
    damaged = used[0] / "kernel.so"
    assert damaged.is_relative_to(ranks_cache)
    # Written anew and not over what this process has mapped.
    content = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(content[: len(content) // 2])
    assert mlp_losses(KernelBackend.INDUCTOR) == expected
    assert len(damaged.read_bytes()) > len(content) // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ranks_cache")
def test_lockstep_ranks_agree_with_eager() -> None:
    program = lowered(mlp(clip=0.5), 3, 3)
    batches = random_batches(TOLERANT_STEPS, 3)
    runs = [
        run_lockstep(program, initial=initial_flats(program), inputs=batches, kernels=kernels)
        for kernels in KernelBackend
    ]
    for found, expected in zip(runs[1].losses, runs[0].losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------- without compiling


def test_without_a_compiler_eager_kernels_take_over_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(KernelWarning, match=r"no C\+\+ compiler") as caught:
        found = mlp_losses(KernelBackend.INDUCTOR)
    assert len(caught) == 1
    assert found == mlp_losses(KernelBackend.EAGER)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mlp_losses(KernelBackend.INDUCTOR) == found


def test_without_headers_of_cuda_a_warning_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "cuda_toolkit", lambda: None)
    monkeypatch.setattr(inductor, "kernel_key", lambda *_: "key")
    kernels = InductorKernels(torch.device("cuda"), folder=tmp_path)
    segment, _ = segment_of("aten.relu.default", torch.ones(2))
    kernels.compile(segment, bound(segment))
    with pytest.warns(KernelWarning, match=r"no headers of CUDA; run `pip install nvidia-cuda"):
        kernels.finish()


def test_unknown_kernels_are_named() -> None:
    with pytest.raises(UserError, match="choose eager or inductor"):
        kernel_backend("fast")


def test_an_entry_is_whole_or_is_not_found(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.find("key") is None
    with cache.draft() as draft:
        (draft / "kernel.so").write_bytes(b"code")
        entry = cache.keep("key", draft)
    assert cache.find("key") == entry
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["key"]
    (entry / "kernel.so").write_bytes(b"cod")
    assert cache.find("key") is None
    with cache.draft() as draft:
        (draft / "kernel.so").write_bytes(b"other")
        cache.keep("key", draft)
    assert cache.find("key") == entry
    (entry / "entry.json").write_text("{")
    assert cache.find("key") is None


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    with cache.locked("key", wait=False) as first:
        assert first
        with cache.locked("key", wait=False) as second:
            assert not second
    with cache.locked("key", wait=True) as third:
        assert third


def test_keys_tell_apart_what_changes_the_code() -> None:
    program = mlp()
    one, other = (program.segment_by_name[name] for name in ("block.forward", "block.backward"))
    outputs = len(one.outputs)
    written = Binding(mode=Mode.WRITE, stride=(1,), is_exclusive=True)
    keys = {
        kernel_key(one, [None] * outputs, CPU, 1),
        kernel_key(one, [written] * outputs, CPU, 1),
        kernel_key(one, [None] * outputs, CPU, 2),
        kernel_key(other, [None] * outputs, CPU, 1),
    }
    assert len(keys) == 4
    renamed = replace(one, name="another")
    assert kernel_key(renamed, [None] * outputs, CPU, 1) in keys


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ZEROIR_CACHE_DIR")
    assert cache_folder() == tmp_path / "xdg" / "zeroir"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "zeroir"
