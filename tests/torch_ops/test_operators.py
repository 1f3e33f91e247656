"""zeroir's operators against torch's: equal bits where the kernel is the same, close values where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from tests.support.examples import examples
from zeroir.torch_ops import attention, attention_backward, dropout, neutral_ops
from zeroir.torch_ops.replaced.attention import _math_backward, _math_forward
from zeroir.torch_ops.replaced.ctc import ctc_loss

# The package's name for it is the operator.
attention_module = sys.modules["zeroir.torch_ops.replaced.attention"]
NO_SEEDS = torch.empty(0, dtype=torch.int64)


def both(
    run: Callable[[], Tensor], wanted: list[Tensor], seeds: Tensor = NO_SEEDS
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a function with torch's operators and with zeroir's."""
    results = []
    for is_neutral in (False, True):
        with neutral_ops(seeds) if is_neutral else torch.enable_grad():
            result = run()
        gradients = torch.autograd.grad(result.float().square().sum(), wanted)
        results.append([result.detach(), *gradients])
    return results[0], results[1]


def qkv(dtype: torch.dtype, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    packed = torch.randn(2, 16, 12, 8).to(dtype).requires_grad_()
    q, k, v = torch.split(packed.transpose(1, 2), 4, 1)
    return packed, q, k[:, :kv_heads], v[:, :kv_heads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.linspace(-3, 3, 256).view(16, 16)},
        {"attn_mask": (torch.arange(256) % 3 > 0).view(16, 16)},
        {"attn_mask": (torch.arange(512) % 5 > 0).view(2, 1, 16, 16)},
        {"scale": 0.3},
        {"enable_gqa": True, "is_causal": True},
    ],
    ids=str,
)
def test_attention_equals_torchs(choice: dict[str, object], dtype: torch.dtype) -> None:
    packed, q, k, v = qkv(dtype, kv_heads=2 if "enable_gqa" in choice else 4)
    mask = choice.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
        choice = {**choice, "attn_mask": mask.to(dtype)}
    run: Callable[..., Tensor] = F.scaled_dot_product_attention
    torchs, ours = both(lambda: run(q, k, v, **choice), [packed])
    for expected, actual in zip(torchs, ours, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_plain_products_agree_with_the_fused_kernel(is_causal: bool, has_mask: bool) -> None:
    _, q, k, v = (x.detach().double() for x in qkv(torch.float32))
    bias = torch.randn(16, 16, dtype=torch.float64) if has_mask and not is_causal else None
    out, lse = attention(q, k, v, bias, is_causal, None)
    plain, plain_lse = _math_forward(q, k, v, bias, is_causal, None)
    torch.testing.assert_close(plain, out)
    torch.testing.assert_close(plain_lse, lse)
    grad = torch.randn_like(out)
    fused = attention_backward(grad, q, k, v, bias, out, lse, is_causal, None)
    for expected, actual in zip(
        _math_backward(grad, q, k, v, bias, out, is_causal, None), fused, strict=True
    ):
        torch.testing.assert_close(expected, actual)


def test_attention_without_keys_is_zero() -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 0, 4)
    out, lse = _math_forward(q, k, k, None, False, None)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.zeros_like(lse))


@pytest.mark.parametrize("excluding", [torch.finfo(torch.float32).min, -5000.0])
def test_a_row_that_a_finite_mask_excludes_is_torchs(excluding: float) -> None:
    _, *rest = qkv(torch.float32)
    q, k, v = (x.detach().requires_grad_() for x in rest)
    bias = torch.zeros(16, 16)
    bias[:3] = excluding
    expected = (q @ k.mT * 0.25 + bias).softmax(3) @ v
    out, _ = _math_forward(q.detach(), k.detach(), v.detach(), bias, False, 0.25)
    torch.testing.assert_close(out, expected.detach())
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    grads = _math_backward(grad, q.detach(), k.detach(), v.detach(), bias, out, False, 0.25)
    for ours, torchs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_a_fully_masked_row_is_zero_and_its_backward_may_use_another_kernel() -> None:
    _, q, k, v = (x.detach() for x in qkv(torch.float32))
    bias = torch.zeros(16, 16)
    bias[3] = -torch.inf
    fused = attention_module.attend(q, k, v, bias, False, None)
    plain = _math_forward(q, k, v, bias, False, None)
    for ours, torchs in zip(plain, fused, strict=True):
        torch.testing.assert_close(ours, torchs)
    assert not plain[0][:, :, 3].any()
    plain_grads = _math_backward(torch.ones_like(q), q, k, v, bias, plain[0], False, None)
    assert all(grad.isfinite().all() for grad in plain_grads)
    assert attention_module._kernel(q, k, v, bias, False) == SDPBackend.FLASH_ATTENTION
    grads = attention_backward(torch.ones_like(q), q, k, v, bias, *plain, False, None)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(
    "utility",
    [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        # These checks compile the operators.
        pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.slow),
    ],
)
def test_operators_pass_torchs_checks(utility: str) -> None:
    check = partial(torch.library.opcheck, test_utils=utility)
    _, q, k, v = (x.detach().requires_grad_() for x in qkv(torch.float32))
    check(torch.ops.zeroir.attention, (q, k, v, None, True, None))
    x = torch.randn(5, 3, requires_grad=True)
    check(torch.ops.zeroir.dropout, (x, 0.3, torch.tensor([5])))
    statistics = torch.zeros(3), torch.ones(3)
    weights = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    for training in (True, False):
        check(torch.ops.zeroir.batch_norm, (x, *weights, *statistics, training, 0.1, 1e-5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (6, 4)),
        (nn.BatchNorm1d, (3, 4, 5)),
        (nn.BatchNorm2d, (2, 4, 3, 3)),
        (nn.InstanceNorm1d, (3, 4, 5)),
        (nn.InstanceNorm2d, (1, 4, 2, 3)),
        (nn.InstanceNorm2d, (2, 4, 3, 3)),
    ],
)
@pytest.mark.parametrize("tracks", [True, False])
def test_norms_equal_torchs(
    training: bool, kind: Callable[..., nn.Module], shape: tuple[int, ...], tracks: bool
) -> None:
    torch.manual_seed(2)
    x = torch.randn(shape)
    if kind is nn.InstanceNorm2d:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    results = []
    for is_neutral in (False, True):
        module = kind(4, affine=True, track_running_stats=tracks).train(training)
        with neutral_ops(NO_SEEDS) if is_neutral else torch.enable_grad():
            y = module(x)
        loss = (y * torch.arange(y.numel()).view(shape)).sum()
        gradients = torch.autograd.grad(loss, [x, *module.parameters()])
        results.append([y, *gradients, *module.buffers()])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("norm", [torch.batch_norm, torch.instance_norm])
def test_norms_of_the_plain_namespace_keep_statistics_in_fp32(norm: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(2, 4, 3, 3).bfloat16(), torch.ones(4, dtype=torch.bfloat16)
    arguments = (weight, weight, None, None, True, 0.1, 1e-5, True)
    with neutral_ops(NO_SEEDS):
        y = norm(x, *arguments)
    wide = [each.float() if isinstance(each, Tensor) else each for each in (x, *arguments)]
    assert torch.equal(y, norm(*wide).bfloat16())


def test_instance_norm_of_one_element_is_refused_in_torchs_words() -> None:
    x, norm = torch.randn(2, 4, 1), nn.InstanceNorm1d(4)
    with pytest.raises(ValueError, match="more than 1 spatial element") as plain:
        norm(x)
    with neutral_ops(NO_SEEDS), pytest.raises(ValueError, match="more than 1") as neutral:
        norm(x)
    assert str(neutral.value) == str(plain.value)


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
@examples(25)
def test_dropout_keeps_the_right_fraction_and_scales_it(seed: int, p: float) -> None:
    x = torch.ones(40_000)
    out, mask = dropout(x, p, torch.tensor([seed]))
    assert abs(mask.float().mean().item() - (1 - p)) < 0.015
    expected = torch.where(mask, 1 / (1 - p) if p < 1 else 0.0, 0.0)
    torch.testing.assert_close(out, expected)
    again = dropout(x.view(200, 200).t(), p, torch.tensor([seed]))[1]
    assert torch.equal(again.reshape(-1), mask)


@given(st.integers(-(2**63), 2**63 - 1), st.floats(0, 1), st.integers(1, 100))
@settings(deadline=None)
def test_dropout_is_splitmix64(seed: int, p: float, numel: int) -> None:
    mask = dropout(torch.ones(numel), p, torch.tensor([seed]))[1]
    expected = [splitmix64(seed, i) >> 40 >= round(p * 2**24) for i in range(1, numel + 1)]
    assert mask.tolist() == expected


def splitmix64(seed: int, i: int) -> int:
    z = (seed + i * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_dropout_of_different_seeds_and_positions_is_independent() -> None:
    masks = torch.stack([dropout(torch.ones(4096), 0.5, torch.tensor([s]))[1] for s in range(16)])
    centred = masks.float() - 0.5
    correlation = (centred @ centred.t()) / (0.25 * 4096)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 0.08


def test_dropout_uses_the_seeds_in_order_and_refuses_more_calls() -> None:
    x = torch.ones(100)
    seeds = torch.tensor([3, 4])
    with neutral_ops(seeds) as mode:
        found = [F.dropout(x, 0.5), F.dropout(x, 0.5, training=False), nn.Dropout(0.5)(x)]
        assert mode.sites == 2
        with pytest.raises(IndexError, match="more often than the 2 seeds"):
            F.dropout(x, 0.5)
    expected = [dropout(x, 0.5, seeds[:1])[0], x, dropout(x, 0.5, seeds[1:])[0]]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_losses_of_16_bit_inputs_are_fp32() -> None:
    logits = torch.randn(4, 7).half().requires_grad_()
    targets = torch.tensor([0, 1, 2, 3])
    with neutral_ops(NO_SEEDS):
        loss = F.cross_entropy(logits, targets)
        assert nn.MSELoss()(logits, logits.detach()).dtype == torch.float32
    assert loss.dtype == torch.float32
    (grad,) = torch.autograd.grad(loss, logits, torch.tensor(65536.0))
    assert grad.isfinite().all()


def test_mixed_dtypes_are_rounded_to_16_bits_outside_of_losses() -> None:
    x, layer = torch.randn(3, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5)).bfloat16()
    with neutral_ops(NO_SEEDS):
        assert layer(x).dtype == torch.bfloat16
        assert (x @ torch.ones(4, 2, dtype=torch.float16)).dtype == torch.float16
        assert torch.einsum("ij,jk->ik", x, torch.ones(4, 2).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("length", [16, 21])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_the_calls_of_cudas_kernels_fit_torchs_shape_functions(
    backend: SDPBackend, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meta(heads: int, rows: int, dim: int = 32) -> Tensor:
        return torch.empty(2, rows, heads, dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    def choose(*_: object) -> SDPBackend:
        return backend

    monkeypatch.setattr(attention_module, "_kernel", choose)
    is_flash = backend is SDPBackend.FLASH_ATTENTION
    mask = None if is_flash else torch.empty(1, 1, length, length, dtype=torch.bool, device="meta")
    q, k, v = meta(4, length), meta(2, length), meta(2, length)
    out, lse = attention_module.attend(q, k, v, mask, is_flash, 0.25)
    assert (out.shape, out.stride()) == (q.shape, q.stride())
    assert (lse.shape, lse.dtype) == ((2, 4, length), torch.float32)
    grads = attention_module.attend_backward(
        torch.empty_like(out), q, k, v, mask, out, lse, is_flash, 0.25
    )
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert (grad.shape, grad.stride(), grad.dtype) == (x.shape, x.stride(), x.dtype)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, 5, 21),
        torch.zeros(2, 1, 21, 5).transpose(2, 3),
        torch.zeros(5, 1),
        torch.zeros(2, 4, 5, 21, dtype=torch.float64),
    ],
)
def test_masks_are_laid_out_for_the_memory_efficient_kernel(mask: Tensor) -> None:
    q, k = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 21, 8)
    found = attention_module._aligned(mask, q, k)
    assert found is not None
    assert (found.shape, found.dtype) == ((2, 4, 5, 21), torch.float32)
    assert found.stride(3) == 1
    assert all(step % 16 == 0 for step in found.stride()[:3])


def test_the_ctc_loss_saves_equal_tensors_for_equal_inputs() -> None:
    """Torch leaves what stands behind the end of a sequence, or of its target, undefined."""
    log_probs = torch.randn(6, 3, 5).log_softmax(-1)
    targets = torch.randint(1, 5, (3, 4))
    lengths, target_lengths = torch.tensor([6, 4, 3]), torch.tensor([2, 1, 3])
    _, alpha = ctc_loss(log_probs, targets, lengths, target_lengths, 0, False)
    assert alpha.shape == (3, 6, 9)
    for row, length, target in zip(alpha, lengths, target_lengths, strict=True):
        assert (row[int(length) :] == -torch.inf).all()
        assert (row[:, 2 * int(target) + 1 :] == -torch.inf).all()


# ---- Recurrent networks in plain operators against torch's


def outputs(module: nn.Module, x: Tensor, *states: object) -> list[Tensor]:
    y, last = module(x, *states)
    return [y, *([last] if isinstance(last, Tensor) else last)]


def compare(module: nn.Module, x: Tensor, *states: object) -> None:
    found: list[list[Tensor]] = []
    for is_neutral in (False, True):
        with neutral_ops(NO_SEEDS) if is_neutral else torch.enable_grad():
            results = outputs(module, x, *states)
        loss = torch.stack([result.cos().sum() for result in results]).sum()
        found.append([*results, *torch.autograd.grad(loss, [x, *module.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(3, 4),
        nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
        nn.LSTM(3, 4, 2, bias=False, proj_size=2),
        nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
        nn.GRU(3, 4, 2, bidirectional=True),
        nn.GRU(3, 4, bias=False, batch_first=True),
        nn.RNN(3, 4, 3),
        nn.RNN(3, 4, bidirectional=True, nonlinearity="relu"),
    ],
    ids=str,
)
def test_networks_equal_torchs(module: nn.Module) -> None:
    torch.manual_seed(0)
    compare(module.double(), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True))


def test_first_states_and_single_sequences() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    h, c = torch.randn(2, 1, 4, dtype=torch.float64)
    compare(nn.LSTM(3, 4).double(), x, (h, c))
    compare(nn.GRU(3, 4).double(), x, h)


def test_dropout_is_between_layers_and_uses_the_seeds() -> None:
    x = torch.randn(5, 2, 3)
    module = nn.LSTM(3, 4, 3, dropout=0.5)
    seeds = torch.arange(4)
    with neutral_ops(seeds) as mode:
        first = module(x)[0]
    assert mode.sites == 2
    with neutral_ops(seeds):
        assert torch.equal(module(x)[0], first)
    with neutral_ops(seeds + 1):
        assert not torch.equal(module(x)[0], first)
    with neutral_ops(seeds) as mode:
        module.eval()(x)
    assert mode.sites == 0


def test_packed_sequences_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
    network = nn.GRU(3, 4)
    with neutral_ops(NO_SEEDS), pytest.raises(NotImplementedError, match="packed sequences"):
        network(packed)
