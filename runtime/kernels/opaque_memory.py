"""Measures the memory of opaque calls on real batches, and compares it with what the program plans for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zeroir.errors import ModelWarning
from zeroir.ir.segments.allowlist import OPAQUE_OPS
from zeroir.ir.segments.segment import Node, Segment
from zeroir.runtime.memory.operator_workspaces import is_profiled, measured
from zeroir.torch_ops.opaque import note_bytes, observe_next, opaque_call
from zeroir.workspace.scratch.allowance import allowance_bytes


def measure_next_calls(segment: Segment, device: torch.device, seen: set[tuple[str, str]]) -> None:
    """Measure the next call of each opaque node, unless ``seen`` has an equal one: an operator and a kind of calls."""
    types = segment.types()
    for node in segment.nodes:
        if node.op not in OPAQUE_OPS:
            continue
        word = str(node.args[-1])
        call = opaque_call(word)
        key = node.op, call.kind
        if key in seen or not call.is_measured:
            continue
        seen.add(key)
        planned = node.workspace_bytes
        planned_bytes = int(allowance_bytes(node, types)) if planned is None else planned
        observe_next(
            word,
            partial(_compared, node=node, device=device, planned_bytes=planned_bytes),
            is_backward=node.op == OPAQUE_OPS[1],
        )


def _compared(
    call: Callable[[], list[Tensor]], *, node: Node, device: torch.device, planned_bytes: int
) -> list[Tensor]:
    """Return the results of a call, after a warning where it holds more than planned."""
    if is_profiled():
        return call()
    results, taken_bytes = measured(call, device)
    word, is_backward = str(node.args[-1]), node.op == OPAQUE_OPS[1]
    note_bytes(word, taken_bytes, is_backward=is_backward)
    if taken_bytes > planned_bytes:
        where = f" (called at {node.source})" if node.source else ""
        warnings.warn(
            f"The code of {opaque_call(word).path or 'the model itself'}{where} runs as it is, and its "
            f"{'backward' if is_backward else 'forward'} held {taken_bytes:,} bytes beside its operands and results, "
            f"while the program plans {planned_bytes:,}: a step may need more memory than was predicted. `zeroir "
            "profile` measures it for plans and budgets (--machine).",
            ModelWarning,
            stacklevel=2,
        )
    return results
