"""Recurrent networks step by step in plain operators, so that traces and rounding are the same on every device.

torch's recurrent functions are one operator with a kernel per device or call other operators from C++, depending on the
device and the arguments; and their dropout has a hidden random state.

Tensors: x ``(length, batch, features)``, states ``(layers × directions, batch, features)``. The weights are in the
order of ``torch.nn``: per layer and direction the input's, the state's, with ``has_biases`` their two biases, and for
an LSTM with projections the projection's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Dropout = Callable[[Tensor, float], Tensor]
RecurrentStep = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
"""Computes the new states of one step from the input's part of the gates, the states, and the state's weights.

The state's weights are its weight, then its bias and its projection, if there are any."""


def recurrent(
    step: RecurrentStep,
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
    """Compute the output of the last layer, then the final states.

    ``drop`` is applied between layers if dropout > 0.
    """
    directions = 2 if bidirectional else 1
    count = len(weights) // (layers * directions)
    final: list[tuple[Tensor, ...]] = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(layers):
        outputs: list[Tensor] = []
        for direction in range(directions):
            at = len(final)
            w_input, *state_weights = weights[at * count : (at + 1) * count]
            b_input = state_weights.pop(1) if has_biases else None
            gates = F.linear(x, w_input, b_input)
            output, last = _run(step, gates, [s[at] for s in states], state_weights, direction == 1)
            outputs.append(output)
            final.append(last)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout > 0 and layer < layers - 1:
            x = drop(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(list(column)) for column in zip(*final, strict=True))


def _run(
    step: RecurrentStep,
    gates: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    is_reversed: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one direction of one layer, and return the outputs of all steps in order, and the final states."""
    current = tuple(states)
    outputs: list[Tensor] = []
    parts = gates.unbind(0)
    for part in reversed(parts) if is_reversed else parts:
        current = step(part, current, weights)
        outputs.append(current[0])
    return torch.stack(outputs[::-1] if is_reversed else outputs), current


def lstm_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute a step of an LSTM."""
    h, c = states
    weight, *optional = weights
    bias = optional.pop(0) if optional and optional[0].dim() == 1 else None
    i, f, g, o = (gates + F.linear(h, weight, bias)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return F.linear(h, optional[0]) if optional else h, c


def gru_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute a step of a GRU."""
    (h,) = states
    r, z, n = gates.chunk(3, 1)
    state_r, state_z, state_n = F.linear(h, *weights).chunk(3, 1)
    n = torch.tanh(n + torch.sigmoid(r + state_r) * state_n)
    return (n + torch.sigmoid(z + state_z) * (h - n),)


def tanh_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute a step of a plain recurrent network with tanh."""
    return (torch.tanh(gates + F.linear(states[0], *weights)),)


def relu_step(
    gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute a step of a plain recurrent network with ReLU."""
    return (torch.relu(gates + F.linear(states[0], *weights)),)
