"""Updates of flat shards against torch.optim, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zeroir.ir.ops import Algorithm
from zeroir.ir.optimizers.declaration import StatePart
from zeroir.runtime.optimizers import arithmetic, lion, shampoo
from zeroir.runtime.optimizers.catalogue import element_update, whole_update
from zeroir.runtime.optimizers.operands import (
    KeptPart,
    Operands,
    WholeOperands,
    WholeParameter,
)

NUMEL = 1000
CASES = [
    (Algorithm.SGD, (0.0, 0.0, 0.0, 0.01)),
    (Algorithm.MOMENTUM, (0.9, 0.0, 0.0, 0.01)),
    (Algorithm.MOMENTUM, (0.9, 0.5, 0.0, 0.0)),
    (Algorithm.MOMENTUM, (0.9, 0.0, 1.0, 0.0)),
    (Algorithm.MOMENTUM, (0.0, 0.0, 0.0, 0.01)),
    (Algorithm.ADAM, (0.9, 0.99, 1e-6, 0.02)),
    (Algorithm.ADAMW, (0.9, 0.999, 1e-8, 0.01)),
    (Algorithm.LION, (0.9, 0.99, 0.1)),
]


def torch_optimizer(
    algorithm: Algorithm, hyper: tuple[float, ...], parameter: Tensor, lr: float
) -> torch.optim.Optimizer | lion.PlainLion:
    a, b, c, weight_decay = (*hyper[:-1], *(4 - len(hyper)) * (0.0,), hyper[-1])
    match algorithm:
        case Algorithm.SGD | Algorithm.MOMENTUM:
            return torch.optim.SGD(
                [parameter], lr, a, b, weight_decay, nesterov=bool(c), fused=True
            )
        case Algorithm.ADAM | Algorithm.ADAMW:
            kind = torch.optim.Adam if algorithm is Algorithm.ADAM else torch.optim.AdamW
            return kind(
                [parameter], lr=lr, betas=(a, b), eps=c, weight_decay=weight_decay, fused=True
            )
        case Algorithm.LION:
            settings = {"lr": lr, "betas": (a, b), "weight_decay": weight_decay}
            return lion.PlainLion([parameter], settings)
        case _:
            raise ValueError(algorithm)


def operands(algorithm: Algorithm, hyper: tuple[float, ...], param: Tensor) -> Operands:
    return Operands(
        params=[param.clone()],
        grads=[torch.zeros_like(param)],
        states=[[torch.zeros_like(param)] for _ in algorithm.state_names],
        step=torch.zeros(1),
        lr=torch.tensor([0.0123], dtype=torch.float64),
        hyper=torch.tensor(hyper, dtype=torch.float64),
        divisor=torch.tensor([3.0]),
        skip=torch.zeros(1),
    )


@pytest.mark.parametrize(("algorithm", "hyper"), CASES)
def test_five_steps_equal_torch_optim(algorithm: Algorithm, hyper: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator)
    x = operands(algorithm, hyper, start)
    parameter = start.clone().requires_grad_()
    optimizer = torch_optimizer(algorithm, hyper, parameter, 0.0123)
    for _ in range(5):
        gradient = torch.randn(NUMEL, generator=generator)
        parameter.grad = gradient / 3.0
        optimizer.step()
        x.grads[0].copy_(gradient)
        x.step.add_(1)
        element_update(algorithm).update(x)
        assert torch.equal(x.params[0], parameter.detach())
    for name, state in zip(algorithm.state_names, x.states, strict=True):
        # Without momentum torch keeps none, and ours stays as it was.
        kept = optimizer.state[parameter].get(name, torch.zeros(NUMEL))
        assert torch.equal(state[0], kept)


@pytest.mark.parametrize(("algorithm", "hyper"), CASES)
def test_a_skipped_update_touches_nothing(algorithm: Algorithm, hyper: tuple[float, ...]) -> None:
    x = operands(algorithm, hyper, torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    x.grads[0].fill_(float("inf"))
    x.step.fill_(1)
    assert x.skip is not None
    x.skip.fill_(1)
    held = [x.params[0], *(state[0] for state in x.states)]
    before = [tensor.clone() for tensor in held]
    element_update(algorithm).update(x)
    assert all(map(torch.equal, held, before))


def test_lion_gives_the_same_bits_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    param, grad = torch.randn(2, 1000, generator=generator)
    found = []
    for numel in (1 << 18, 96):
        monkeypatch.setattr(arithmetic, "STEPPED_CHUNK_NUMEL", numel)
        x = operands(Algorithm.LION, (0.9, 0.99, 0.1), param)
        x.grads[0].copy_(grad)
        element_update(Algorithm.LION).update(x)
        found.append((x.params[0], x.states[0][0]))
    for whole, chunked in zip(*found, strict=True):
        assert torch.equal(whole, chunked)


@pytest.mark.parametrize(("algorithm", "hyper"), CASES)
def test_one_call_updates_pieces_as_it_updates_the_whole(
    algorithm: Algorithm, hyper: tuple[float, ...]
) -> None:
    """Pieces begin and end at multiples of 64 elements, as the intervals of groups do."""
    generator = torch.Generator().manual_seed(3)
    param, grad = torch.randn(2, 1024, generator=generator)
    whole, parts = (operands(algorithm, hyper, param) for _ in range(2))
    cuts = [slice(0, 64), slice(64, 384), slice(384, 512), slice(512, 1024)]
    parts = replace(
        parts,
        params=[parts.params[0][cut] for cut in cuts],
        grads=[parts.grads[0][cut] for cut in cuts],
        states=[[state[0][cut] for cut in cuts] for state in parts.states],
    )
    for step in (1, 2):
        whole.grads[0].copy_(grad)
        for piece, cut in zip(parts.grads, cuts, strict=True):
            piece.copy_(grad[cut])
        for x in (whole, parts):
            x.step.fill_(step)
            element_update(algorithm).update(x)
    assert torch.equal(torch.cat(list(parts.params)), whole.params[0])
    for of_parts, of_whole in zip(parts.states, whole.states, strict=True):
        assert torch.equal(torch.cat(list(of_parts)), of_whole[0])


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_muon_equals_torch_on_matrices(
    shape: tuple[int, int], nesterov: bool, is_scaled: bool
) -> None:
    """Tall and wide ones; where losses are scaled, a step with an infinite gradient in between is skipped."""
    generator = torch.Generator().manual_seed(4)
    param = torch.randn(shape, generator=generator)
    parameter = param.clone().requires_grad_()
    coefficients = (3.0, -4.0, 2.0)
    optimizer: torch.optim.Optimizer = torch.optim.Muon(
        [parameter], 0.02, 0.1, 0.9, nesterov=nesterov, ns_coefficients=coefficients, ns_steps=3
    )
    direction = torch.empty(shape, dtype=torch.bfloat16)
    momentum, gradient = torch.zeros(param.numel()), torch.empty(param.numel())
    skip = torch.zeros(1) if is_scaled else None
    step, lr = torch.zeros(1), torch.tensor([0.02], dtype=torch.float64)
    hyper = torch.tensor([0.9, nesterov, 0.1, 1e-7, 3, *coefficients, 0], dtype=torch.float64)
    operands = Operands(
        params=[direction.view(-1)],
        grads=[gradient],
        states=[[momentum]],
        step=step,
        lr=lr,
        hyper=hyper,
        divisor=torch.tensor([3.0]),
        skip=skip,
    )
    parameters = [WholeParameter(direction=direction, param=param.view(-1), start=0)]
    whole = WholeOperands(parameters=parameters, step=step, lr=lr, hyper=hyper, skip=skip)
    update = whole_update(Algorithm.MUON)
    for is_skipped in (False, is_scaled, False):
        parameter.grad = torch.randn(shape, generator=generator)
        gradient.copy_(parameter.grad.flatten() * 3.0)
        if is_skipped:
            gradient.fill_(float("inf"))
        else:
            parameter.grad = gradient.view(shape) / 3.0
            optimizer.step()
        if skip is not None:
            skip.fill_(is_skipped)
        update.directions(operands)
        update.step(whole)
        assert torch.equal(param, parameter.detach())
        kept = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, kept.flatten())


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (2, 3, 4), (5,)])
def test_adafactor_equals_torch_on_any_shape(shape: tuple[int, ...], is_scaled: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(shape, generator=generator)
    parameter = start.clone().requires_grad_()
    optimizer = torch.optim.Adafactor(
        [parameter], 0.3, beta2_decay=-0.7, eps=(1e-4, 0.02), d=1.5, weight_decay=0.1
    )
    kept = [torch.zeros(part.shape) for part in own_parts(Algorithm.ADAFACTOR, shape)]
    hyper = (-0.7, 1e-4, 0.02, 1.5, 0.1)
    param = steps_like(optimizer, parameter, Algorithm.ADAFACTOR, hyper, 0.3, kept, is_scaled)
    assert torch.equal(param, parameter.detach())
    names = ("row_var", "col_var") if len(kept) == 2 else ("variance",)
    for name, own in zip(names, kept, strict=True):
        assert torch.equal(own, optimizer.state[parameter][name])


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_shampoo_equals_its_reference_on_matrices(shape: tuple[int, int], is_scaled: bool) -> None:
    parameter = torch.randn(shape, generator=torch.Generator().manual_seed(6)).requires_grad_()
    settings = {"lr": 0.3, "eps": 0.01, "weight_decay": 0.1}
    reference = shampoo.PlainShampoo([parameter], settings)
    kept = [torch.zeros(part.shape) for part in own_parts(Algorithm.SHAMPOO, shape)]
    param = steps_like(reference, parameter, Algorithm.SHAMPOO, (0.01, 0.1), 0.3, kept, is_scaled)
    assert torch.allclose(param, parameter.detach(), rtol=1e-5)
    assert all(map(torch.allclose, kept, reference.state[parameter]))


def own_parts(algorithm: Algorithm, shape: tuple[int, ...]) -> Sequence[StatePart]:
    state = algorithm.declaration.own_state
    assert state is not None
    return state.parts(shape)


def steps_like(
    optimizer: torch.optim.Optimizer | shampoo.PlainShampoo,
    parameter: Tensor,
    algorithm: Algorithm,
    hyper: tuple[float, ...],
    lr: float,
    kept: Sequence[Tensor],
    is_scaled: bool,
) -> Tensor:
    """Steps of both; what ours leaves of the parameter. Where losses are scaled, one in between is skipped."""
    generator = torch.Generator().manual_seed(7)
    param, direction = parameter.detach().clone(), torch.empty(parameter.shape)
    skip = torch.zeros(1) if is_scaled else None
    whole = WholeParameter(
        direction=direction,
        param=param.view(-1),
        start=0,
        whole=param,
        kept=[KeptPart(whole=each, own=each.view(-1), start=0) for each in kept],
    )
    operands = WholeOperands(
        parameters=[whole],
        step=torch.zeros(1),
        lr=torch.tensor([lr], dtype=torch.float64),
        hyper=torch.tensor(hyper, dtype=torch.float64),
        skip=skip,
    )
    for is_skipped in (False, is_scaled, False):
        direction.copy_(torch.randn(parameter.shape, generator=generator))
        if skip is not None:
            skip.fill_(is_skipped)
        if is_skipped:
            direction.fill_(float("inf"))
        else:
            parameter.grad = direction.clone()
            optimizer.step()
            operands.step.add_(1)
        whole_update(algorithm).step(operands)
    return param
