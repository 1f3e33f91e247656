"""The engine on a CUDA device computes what the CPU reference does, alone and as a rank of NCCL."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.support import (
    MLP_TOLERANCE,
    SEED,
    TOLERANCE,
    example,
    example_batches,
    example_file,
    example_losses,
    losses_of,
    waiting_is_an_error,
)
from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.lockstep import run_lockstep
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.analysis.labels import labels
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.torch_ops import attention, attention_backward, dropout
from zeroir.torch_ops.replaced.attention import _math_backward, _math_forward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_example_follows_the_cpu(device: torch.device, stage: int, precision: str) -> None:
    engine = Engine(example(stage, 1, precision), EngineSettings(seed=SEED), device=device)
    engine.initialise(example_file().model, SEED)
    found = losses_of(engine, example_batches())
    engine.close()
    bound = TOLERANCE[precision]
    torch.testing.assert_close(found, example_losses(precision), rtol=bound, atol=0.0)
    assert found[-1] < found[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_stage_computes_the_same_on_one_rank(device: torch.device, precision: str) -> None:
    """Of a program without atomic additions, whose bits do not depend on the run."""
    logical = mlp(precision=precision, clip=0.5)
    batches = [batch for ((batch,),) in random_batches(10, 1)]
    found = []
    for stage in range(4):
        engine = Engine(lowered(logical, stage, 1), device=device)
        engine.initialise_flats(initial_flats(logical))
        found.append(losses_of(engine, batches))
        engine.close()
    assert all(torch.equal(losses, found[0]) for losses in found[1:])


@pytest.mark.usefixtures("_one_nccl_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_one_nccl_rank_follows_the_reference(
    device: torch.device, stage: int, precision: str
) -> None:
    logical = mlp(precision=precision, clip=0.5)
    program = lowered(logical, stage, 1)
    batches = random_batches(10, 1)
    expected = run_lockstep(program, initial=initial_flats(logical), inputs=batches)
    engine = Engine(program, EngineSettings(backend=Backend.NCCL), device=device)
    engine.initialise_flats(initial_flats(logical))
    found = losses_of(engine, [batch for ((batch,),) in batches])
    engine.close()
    bound = MLP_TOLERANCE[precision]
    reference = torch.tensor([losses[0] for losses in expected.losses])
    torch.testing.assert_close(found, reference, rtol=bound, atol=bound)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adafactor"])
def test_the_fused_optimizers_follow_the_cpu(device: torch.device, optimizer: str) -> None:
    logical = mlp(optimizer=optimizer, clip=0.5, micro_steps=2, ema=0.9)
    program = lowered(logical, 2, 1)
    batches = random_batches(10, 1, micro_steps=2)
    expected = run_lockstep(program, initial=initial_flats(logical), inputs=batches)
    engine = Engine(program, device=device)
    engine.initialise_flats(initial_flats(logical))
    for (micro_batches,) in batches:
        engine.step(micro_batches)
    for key, value in engine.full_state().items():
        torch.testing.assert_close(value.cpu(), expected.state[key], rtol=1e-3, atol=1e-4)
    engine.close()


def test_an_overflow_on_the_device_skips_the_step(device: torch.device) -> None:
    logical = mlp(precision="fp16")
    engine = Engine(lowered(logical, 3, 1), device=device)
    engine.initialise_flats(initial_flats(logical))
    before = engine.full_parameters()
    result = engine.step({"x": torch.full((4, 6), 1e4)})
    assert result.is_skipped
    for name, value in engine.full_parameters().items():
        assert torch.equal(value, before[name])
    engine.close()


@pytest.mark.slow
def test_inductor_follows_the_eager_kernels(device: torch.device) -> None:
    found = []
    for kernels in KernelBackend:
        engine = Engine(
            example(3, 1, "bf16"), EngineSettings(kernels=kernels, seed=SEED), device=device
        )
        engine.initialise(example_file().model, SEED)
        found.append(losses_of(engine, example_batches()))
        engine.close()
    torch.testing.assert_close(found[1], found[0], rtol=TOLERANCE["bf16"], atol=0.0)


def test_profiles_name_every_op_on_every_stream(device: torch.device) -> None:
    program = example(3, 1, "fp32")
    engine = Engine(program, EngineSettings(seed=SEED), device=device)
    engine.initialise(example_file().model, SEED)
    first, second = example_batches(2)
    engine.step(first)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine.step(second)
    engine.close()
    found = {event.key for event in profiler.key_averages()}
    named = labels(program)
    sections = (program.section_by_name[name] for name in (LAST_MICRO_STEP, UPDATE))
    done = {
        named[position]
        for section in sections
        for position, op in section.positioned_ops()
        if not isinstance(op, ops.Wait)
    }
    assert done <= found


def test_a_step_waits_for_the_device_nowhere(device: torch.device) -> None:
    """Only whoever reads a loss waits; torch itself raises on a call that synchronises."""
    engine = Engine(example(3, 1, "fp16"), EngineSettings(seed=SEED), device=device)
    engine.initialise(example_file().model, SEED)
    first, second = ((x.to(device), y.to(device)) for x, y in example_batches(2))
    engine.step(first)
    with waiting_is_an_error():
        result = engine.step(second)
    assert result.loss > 0
    engine.close()


# ------------------------------------------------------------------------------------- our operators' kernels


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dim", [8, 20, 64])
@pytest.mark.parametrize("choice", ["plain", "causal", "mask"])
def test_every_kernel_of_attention_is_plain_products(
    device: torch.device, dtype: torch.dtype, bound: float, kv_heads: int, dim: int, choice: str
) -> None:
    """Flash for 16 bits without a mask, memory-efficient for the rest, plain products where neither can."""
    torch.manual_seed(0)
    length = 48

    def random(heads: int) -> torch.Tensor:
        by_length = torch.randn(2, length, heads, dim, device=device, dtype=dtype)
        return by_length.transpose(1, 2)

    q, k, v, grad = random(4), random(kv_heads), random(kv_heads), random(4)
    mask = None
    if choice == "mask":
        mask = torch.rand(length, length, device=device) > 0.3
        mask.fill_diagonal_(True)
    is_causal = choice == "causal"
    out, lse = attention(q, k, v, mask, is_causal, None)
    grads = attention_backward(grad, q, k, v, mask, out, lse, is_causal, None)
    bias = None if mask is None else torch.zeros_like(mask, dtype=torch.float64)
    if bias is not None and mask is not None:
        bias.masked_fill_(~mask, -torch.inf)
    wide_q = q.double()
    wide_k, wide_v = (x.double().repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    plain, plain_lse = _math_forward(wide_q, wide_k, wide_v, bias, is_causal, None)
    plain_q, plain_k, plain_v = _math_backward(
        grad.double(), wide_q, wide_k, wide_v, bias, plain, is_causal, None
    )
    groups = (2, kv_heads, 4 // kv_heads, length, dim)
    expected = (plain_q, plain_k.view(groups).sum(2), plain_v.view(groups).sum(2))
    torch.testing.assert_close(out.double(), plain, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), plain_lse, rtol=bound, atol=bound)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * bound, atol=4 * bound)


def test_dropout_has_the_bits_of_the_cpu(device: torch.device) -> None:
    x, seed = torch.randn(1000), torch.tensor([1 << 40])
    expected, mask = dropout(x, 0.3, seed)
    for where in (seed, seed.to(device)):
        found, found_mask = dropout(x.to(device), 0.3, where)
        assert torch.equal(found_mask.cpu(), mask)
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("stage", range(4))
def test_evaluations_equal_the_reference(device: torch.device, stage: int) -> None:
    """As graphs and op by op, between the steps, which they do not change."""
    program = example(stage, 1, "fp32")
    batches = example_batches()
    lockstep = Lockstep(program, seed=SEED)
    lockstep.initialise(example_file().model, SEED)
    expected: list[float] = []
    for batch in batches:
        expected.append(float(lockstep.evaluate([batch])[0].loss))
        lockstep.step([[batch]])
    for cuda_graphs in (False, True):
        engine = Engine(program, EngineSettings(seed=SEED, cuda_graphs=cuda_graphs), device=device)
        engine.initialise(example_file().model, SEED)
        found: list[float] = []
        for batch in batches:
            found.append(engine.evaluate(batch).loss)
            assert engine.evaluate(batch).loss == found[-1]
            engine.step(batch)
        engine.close()
        assert found == pytest.approx(expected, rel=TOLERANCE["fp32"])
