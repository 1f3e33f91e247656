"""Recurrent networks step by step in plain operators, so that they are traced, and round, alike on every device.

torch's own are one operator with a kernel per device, or are written over others in C++, depending on where and how
they are called; and their dropout keeps a hidden random state.

Tensors: x ``(length, batch, features)``, states ``(layers × directions, batch, features)``. The weights come as
``torch.nn`` keeps them: per layer and direction the input's, the state's, with ``has_biases`` their two biases, and
for an LSTM with projections the projection's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Dropout = Callable[[Tensor, float], Tensor]
Step = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
"""The input's part of the gates, the states and the state's weight, bias and projection to the new states."""


def recurrent(
    step: Step,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
    drop: Dropout,
) -> tuple[Tensor, ...]:
    """The output of the last layer, then the last states; ``drop`` is applied between layers where dropout > 0."""
    directions = 2 if bidirectional else 1
    count = len(weights) // (layers * directions)
    last: list[tuple[Tensor, ...]] = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(layers):
        outputs: list[Tensor] = []
        for direction in range(directions):
            at = len(last)
            w_input, *own = weights[at * count : (at + 1) * count]
            b_input = own.pop(1) if has_biases else None
            output, now = _run(
                step, F.linear(x, w_input, b_input), [s[at] for s in states], own, direction == 1
            )
            outputs.append(output)
            last.append(now)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout > 0 and layer < layers - 1:
            x = drop(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(list(column)) for column in zip(*last, strict=True))


def _run(
    step: Step,
    gates: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    is_reversed: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One direction of one layer: the outputs of all steps in order, and the last states."""
    now = tuple(states)
    outputs: list[Tensor] = []
    parts = gates.unbind(0)
    for part in reversed(parts) if is_reversed else parts:
        now = step(part, now, weights)
        outputs.append(now[0])
    return torch.stack(outputs[::-1] if is_reversed else outputs), now


def lstm_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Long short-term memory; a weight beyond state's and bias is the projection."""
    h, c = states
    weight, *others = weights
    bias = others.pop(0) if others and others[0].dim() == 1 else None
    i, f, g, o = (gates + F.linear(h, weight, bias)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return F.linear(h, others[0]) if others else h, c


def gru_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gated recurrent unit."""
    (h,) = states
    r, z, n = gates.chunk(3, 1)
    own_r, own_z, own_n = F.linear(h, *weights).chunk(3, 1)
    n = torch.tanh(n + torch.sigmoid(r + own_r) * own_n)
    return (n + torch.sigmoid(z + own_z) * (h - n),)


def tanh_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """A plain network."""
    return (torch.tanh(gates + F.linear(states[0], *weights)),)


def relu_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """A plain network that clamps at zero."""
    return (torch.relu(gates + F.linear(states[0], *weights)),)
