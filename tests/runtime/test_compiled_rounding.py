"""Compiled code that rounds states of 8 bits has the bits of torch's operators, and takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime.support import begun, random_batches
from tests.runtime.test_eight_bit_states import CODED, coded_update, zero_states
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import InternalError, KernelWarning
from zeroir.ir.buffers import Role
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.ops import Algorithm
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.runtime.eight_bit import compiled_rounding
from zeroir.runtime.eight_bit import update as eight_bit_update
from zeroir.runtime.eight_bit.compiled_rounding import (
    CompiledRounding,
    CompiledState,
    open_rounding,
)
from zeroir.runtime.eight_bit.rounding import Scratch, code_map, narrow, widen
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels import cpp_library
from zeroir.runtime.memory.allocations import allocations, peak_bytes

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(cpp_library.cpp_compiler() is None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def compiled() -> CompiledRounding:
    return CompiledRounding()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def near_every_bound(*, signed: bool) -> Tensor:
    """Blocks of scale 1: the ends of every upper half of the bits up to 1, and the numbers around each bound."""
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    bounds = code_map(CPU, signed=signed).bounds
    bounds = bounds[bounds.isfinite()].view(torch.int32)
    bits = torch.cat([halves, halves | 0xFFFF, bounds - 1, bounds, bounds + 1])
    values = bits.view(torch.float32)
    values = values[values.abs() <= 1]
    values = values if signed else values.abs()
    rows = torch.zeros(-(-values.numel() // 255), 255)
    rows.view(-1)[: values.numel()] = values
    return torch.nn.functional.pad(rows, (1, 0), value=1.0).view(-1)


def awkward(*, signed: bool) -> Tensor:
    """Blocks of zeros, of the smallest number, of the largest, of very different ones, with NaN and with infinity."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, BLOCK_NUMEL, generator=generator)
    values *= torch.exp(8 * torch.randn(400, BLOCK_NUMEL, generator=generator))
    values[0], values[1], values[2] = 0.0, 1e-45, torch.finfo(torch.float32).max
    values[3, 5], values[4, 7], values[5, :2] = (
        torch.nan,
        torch.inf,
        torch.tensor([-0.0, -torch.inf]),
    )
    return (values if signed else values.abs()).view(-1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.usefixtures("threads")
def test_codes_scales_and_values_have_the_bits_of_torchs_operators(
    compiled: CompiledRounding, signed: bool
) -> None:
    for values in (near_every_bound(signed=signed), awkward(signed=signed)):
        numel, scratch = values.numel(), Scratch(values.numel(), CPU)
        codes = [torch.full((numel,), 77, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.full((numel // BLOCK_NUMEL,), 7.0) for _ in range(2)]
        wide = [torch.empty(numel) for _ in range(2)]
        given = values.clone()
        blocks, state = slice(None), compiled.state(codes[0], scales[0], signed=signed)
        state.narrow(blocks, given)
        narrow(values.clone(), codes[1], scales[1], scratch, signed=signed)
        state.widen(blocks, wide[0])
        widen(codes[1], scales[1], wide[1], scratch, signed=signed)
        assert torch.equal(*codes)
        # Bits, because NaN is not equal to NaN.
        assert torch.equal(*(tensor.view(torch.int32) for tensor in scales))
        assert torch.equal(*(tensor.view(torch.int32) for tensor in wide))
        assert torch.equal(given.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("algorithm", "hyper"), CODED)
@pytest.mark.usefixtures("threads")
def test_an_update_has_the_same_bits_in_other_chunks_and_on_more_threads(
    algorithm: Algorithm,
    hyper: tuple[float, ...],
    compiled: CompiledRounding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last chunk is a part of one. A step in the middle is skipped."""
    monkeypatch.setattr(eight_bit_update, "CODED_THREAD_CHUNK_NUMEL", 3 * BLOCK_NUMEL)
    numel = 10 * BLOCK_NUMEL
    results = []
    for rounding in (None, compiled):
        generator = torch.Generator().manual_seed(3)
        param, states = torch.randn(numel, generator=generator), zero_states(algorithm, numel)
        update = partial(coded_update, algorithm, hyper, param, states)
        for step, skip in ((1.0, 0.0), (2.0, 1.0), (2.0, 0.0)):
            grad = torch.randn(numel, generator=generator)
            grad[:BLOCK_NUMEL] = torch.inf if skip else 0.0
            replace(update(grad=grad, step=step, skip=skip), compiled=rounding)()
        results.append([param, *(tensor for state in states for tensor in state)])
    assert all(map(torch.equal, *results))


def test_an_update_takes_the_states_of_one_chunk_and_nothing_else(
    compiled: CompiledRounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eight_bit_update, "CODED_THREAD_CHUNK_NUMEL", 4 * BLOCK_NUMEL)
    threads = torch.get_num_threads()
    numel = (4 * threads + 1) * BLOCK_NUMEL
    states = zero_states(Algorithm.ADAMW, numel)
    hyper = (0.9, 0.999, 1e-8, 0.01)
    update = replace(
        coded_update(Algorithm.ADAMW, hyper, torch.randn(numel), states, grad=torch.randn(numel)),
        compiled=compiled,
    )
    update()
    peak = peak_bytes(allocations(update))
    assert 0 <= peak - 2 * 4 * 4 * threads * BLOCK_NUMEL <= 64


def test_tensors_that_do_not_fit_are_refused(compiled: CompiledRounding) -> None:
    codes, scales = torch.zeros(2 * BLOCK_NUMEL, dtype=torch.uint8), torch.zeros(2)
    state = compiled.state(codes, scales, signed=True)
    numel = 2 * BLOCK_NUMEL
    for wide in (torch.zeros(BLOCK_NUMEL), torch.zeros(2 * numel)[::2], codes):
        for use in (state.widen, state.narrow):
            with pytest.raises(InternalError, match="whole contiguous blocks"):
                use(slice(0, 2), wide)
    with pytest.raises(InternalError, match="whole contiguous blocks"):
        state.widen(slice(1, 3), torch.zeros(numel))
    with pytest.raises(InternalError, match="whole contiguous blocks"):
        compiled.state(codes[1:], scales, signed=True)


def test_a_training_is_updated_by_compiled_code_to_the_bits_of_lockstep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = applied(mlp(has_codes=True), tuple(for_stage(2, 1)))
    narrowed: list[slice] = []
    original = CompiledState.narrow

    def noted(
        self: CompiledState, blocks: slice, values: Tensor, is_skipped: Tensor | None = None
    ) -> None:
        narrowed.append(blocks)
        original(self, blocks, values, is_skipped)

    monkeypatch.setattr(CompiledState, "narrow", noted)
    engine, lockstep = begun(Engine(program)), begun(Lockstep(program))
    for ((batch,),) in random_batches(2, 1):
        engine.step(batch)
    assert len(narrowed) == 2 * 2 * len(program.flats)
    for batches in random_batches(2, 1):
        lockstep.step(batches)
    assert len(narrowed) == 2 * 2 * len(program.flats)
    for name, value in lockstep.buffers(0).items():
        if program.buffer_by_name[name].role is Role.STATE:
            assert torch.equal(engine.buffer(name), value), name
    engine.close()


def test_code_is_compiled_only_where_the_cpu_updates_states_of_8_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    monkeypatch.setattr(compiled_rounding, "CompiledRounding", lambda: made.append("code"))
    coded, wide = mlp(has_codes=True), mlp()
    open_rounding(coded, torch.device("cuda"))
    open_rounding(wide, CPU)
    assert not made
    open_rounding(coded, CPU)
    on_host = applied(coded, (*for_stage(2, 1), OffloadOptimizer()))
    open_rounding(on_host, torch.device("cuda"))
    assert made == ["code", "code"]


def test_without_a_compiler_there_is_a_warning_and_torchs_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path))
    program = mlp(dim=24, has_codes=True)
    for compiler, reason in (
        ("no-such-compiler", r"no C\+\+ compiler"),
        ("false", "false ended with code 1"),
    ):
        monkeypatch.setenv("CXX", compiler)
        with pytest.warns(KernelWarning, match=reason):
            assert open_rounding(program, CPU) is None
    # Only one rank of a job says so.
    monkeypatch.setenv("RANK", "1")
    assert open_rounding(program, CPU) is None
    monkeypatch.delenv("CXX")
    assert open_rounding(program, CPU) is not None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert open_rounding(program, CPU) is not None  # kept in the cache
