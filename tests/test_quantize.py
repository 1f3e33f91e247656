"""Frozen weights of few bits: their accuracy, their bytes, and training beside them."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.quantized_workers import Net, batch_of
from tests.memory.judge import judge
from tests.runtime.support import Ranks, require_success
from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program
from zeroir.quantize import BLOCK_NUMEL, NF4_LEVELS, WeightFormat


def test_the_levels_are_quantiles_of_the_normal_distribution() -> None:
    """Section 3 of the paper: eight quantiles of each side, zero in both, the outer ones scaled to 1."""
    edge = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:
        return [quantile(edge + (0.5 - edge) * step / count) for step in range(count)]

    largest = quantile(edge)
    lower, upper = ([value / largest for value in side(count)] for count in (7, 8))
    levels = [-value for value in lower] + [0.0] + upper[::-1]
    assert pytest.approx(levels, abs=1e-6) == NF4_LEVELS


def dequantized(layer: nn.Linear) -> Tensor:
    """The weight with which the layer computes."""
    product: Tensor = layer(torch.eye(layer.in_features))
    return (product - layer.bias).detach().T


@pytest.mark.parametrize(
    ("weights", "bits", "of_scale"),
    [
        ("nf4", 4.5, 0.152),
        ("nf4_double", 4.13, 0.156),
        ("int8", 8.125, 0.5 / 127),
        ("fp8", 8.125, 16 / 448),
    ],
)
def test_a_weight_is_near_its_own(weights: WeightFormat, bits: float, of_scale: float) -> None:
    """Within half of the largest distance between levels, as a part of the largest weight of block or row."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 320)
    with torch.no_grad():
        layer.weight[3:5] = 0
    original = layer.weight.clone()
    zeroir.quantize_frozen(layer.requires_grad_(False), weights)
    numel = BLOCK_NUMEL if weights.startswith("nf4") else 256
    blocks = original.view(-1, numel)
    error = (dequantized(layer) - original).reshape(-1, numel).abs()
    assert (error <= of_scale * blocks.abs().amax(dim=1, keepdim=True) + 1e-6).all()
    stored_bytes = sum(p.nbytes for name, p in layer.named_parameters() if name != "bias")
    assert stored_bytes * 8 / original.numel() == pytest.approx(bits, abs=0.03)


def test_it_chooses_frozen_layers_alone() -> None:
    tied, own = nn.Linear(8, 8), nn.Linear(8, 8)
    embedding = nn.Embedding(8, 8)
    embedding.weight = tied.weight
    model = nn.ModuleDict(
        {"tied": tied, "own": own, "embedding": embedding, "out": nn.Linear(8, 8)}
    )
    with pytest.raises(UserError, match=r"no nn\.Linear with a frozen weight"):
        zeroir.quantize_frozen(model)
    model.requires_grad_(False)
    with pytest.raises(UserError, match=r"The pattern hea\* .* names look like tied"):
        zeroir.quantize_frozen(model, skip=["hea*"])
    handle = own.register_forward_hook(lambda *_: None)
    assert zeroir.quantize_frozen(model, skip=["ou*"]) is model
    quantized = [name for name, part in model.named_modules() if hasattr(part, "weight_scales")]
    assert quantized == ["own"]
    assert handle.id in own._forward_hooks
    assert own.to(torch.bfloat16).weight_scales.dtype == torch.uint8
    assert own(torch.ones(2, 8)).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_no_fused_kernel_of_torch_reads_the_bytes() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    x = torch.randn(2, 5, 16)
    expected = encoder(x)
    zeroir.quantize_frozen(encoder, "int8")
    assert torch.allclose(encoder(x), expected, atol=0.1)


def test_what_has_no_code_is_refused() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(UserError, match="cannot be quantised as 'int3': take one of nf4, "):
        zeroir.quantize_frozen(layer, "int3")  # type: ignore[arg-type]
    layer.weight[0, 0] = torch.inf
    with pytest.raises(UserError, match="The parameter weight has elements that are not"):
        zeroir.quantize_frozen(layer)


def gathered_bytes(program: Program, part: str) -> int:
    return sum(
        buffer.numel * buffer.dtype.itemsize_bytes
        for buffer in program.buffers
        if buffer.role is Role.GATHERED and part in buffer.name
    )


def test_the_wire_carries_the_bytes_alone() -> None:
    """At most 0.3 of the bytes in bfloat16; and backward keeps no weight in the compute dtype."""
    made: dict[str, int] = {}
    for weights in ("bf16", "nf4"):
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        net.requires_grad_(False)
        if weights == "nf4":
            zeroir.quantize_frozen(net)
        net.insert(0, nn.Linear(256, 256))
        program = zeroir.compile(
            net,
            torch.zeros(2, 256),
            loss=lambda module, x: module(x).square().mean(),
            precision="bf16",
            world_size=2,
            units="[123]",
            evaluate=False,
        ).program
        frozen = [flat for flat in program.flats if not flat.is_trainable]
        assert len(frozen) == 3
        made[weights] = gathered_bytes(program, ".frozen")
        kept = [b for b in program.buffers if b.role is Role.SAVED]
        assert max(buffer.numel for buffer in kept) < 256 * 256
    assert made["nf4"] <= 0.3 * made["bf16"]


@pytest.mark.slow
def test_their_predicted_memory_is_exact() -> None:
    """Bytes seen as other elements take none."""
    net = zeroir.quantize_frozen(Net(0), "int8")
    program = zeroir.compile(net, batch_of(0, 0), world_size=2).program
    assert not judge(program, [batch_of(0, 0)], model=net).wrong


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_beside_them_as_one_eager_model(tmp_path: Path, world_size: int) -> None:
    """Losses and parameters, bit for bit; a checkpoint has the bytes, with which another engine goes on."""
    ranks = Ranks(world_size, tmp_path, module="tests.api.quantized_workers")
    require_success(ranks.wait())
