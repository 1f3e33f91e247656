"""Conversion of optimizer states whose width in a checkpoint differs: FP32 states are rounded, codes are widened.

Blocks start at parameters in both forms, so the states of each parameter can be converted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from zeroir.ir.contents import FlatContent
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel
from zeroir.ir.optimizers.forms import (
    ABSMAX,
    CODES,
    QUANTITIES_OF_BLOCKS,
    StateForm,
    form_of,
    is_signed,
    state_of,
)
from zeroir.ir.program import Program, Slot
from zeroir.runtime.checkpoint.mapping import StoredElements, StoredParameters
from zeroir.runtime.checkpoint.parts import elements_on
from zeroir.runtime.eight_bit.rounding import Scratch, narrow, widened
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common

Fill = Callable[[Iterable[StoredElements], Tensor], None]
"""A function that fills a flat tensor with stored elements, each at its ``offset``."""

_CHUNK_BLOCKS: Final = 4096
"""The number of blocks converted at once."""


def fill_states_of_other_bits(
    program: Program, memory: RankMemory, stored: StoredParameters, fill: Fill
) -> None:
    """Fill those states of a rank that the checkpoint has only in another width.

    Raises:
        UserError: where a file cannot be read.
    """
    for buffer in program.buffers:
        content = buffer.holds
        if not isinstance(content, FlatContent):
            continue
        held = elements_on(program, buffer, content, memory.rank)
        quantity = content.quantity
        for slot in program.flat_by_name[content.flat].slots:
            if not stored.has(slot, quantity) or stored.place(slot, quantity) is not None:
                continue
            blocks = range(blocks_numel(slot.numel))
            state = state_of(quantity)
            if quantity in QUANTITIES_OF_BLOCKS:
                first_block = slot.offset // BLOCK_NUMEL
                for part in _chunks(common(_moved(held, -first_block), blocks)):
                    _, scales = _rounded(stored, slot, state, part, fill)
                    first = part.start + first_block - held.start
                    memory.write(buffer.name, first, scales)
                continue
            own = _moved(held, -slot.offset)
            wanted = range(own.start // BLOCK_NUMEL, blocks_numel(own.stop))
            for part in _chunks(common(wanted, blocks)):
                elements = range(part.start * BLOCK_NUMEL, part.stop * BLOCK_NUMEL)
                if form_of(quantity) is StateForm.EIGHT_BITS:
                    values, _ = _rounded(stored, slot, state, part, fill)
                else:
                    values = _widened(stored, slot, state, part, fill)
                inside = common(common(elements, own), range(slot.numel))
                own_values = values[inside.start - elements.start : inside.stop - elements.start]
                memory.write(buffer.name, inside.start + slot.offset - held.start, own_values)


def _moved(elements: range, by: int) -> range:
    return range(elements.start + by, elements.stop + by)


def _chunks(blocks: range) -> Iterator[range]:
    for start in range(blocks.start, blocks.stop, _CHUNK_BLOCKS):
        yield range(start, min(start + _CHUNK_BLOCKS, blocks.stop))


def _elements(slot: Slot, blocks: range) -> range:
    """Return the elements of a parameter in some of its blocks, counted from its first one."""
    return range(blocks.start * BLOCK_NUMEL, min(blocks.stop * BLOCK_NUMEL, slot.numel))


def _rounded(
    stored: StoredParameters, slot: Slot, state: str, blocks: range, fill: Fill
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of blocks of a parameter whose state is stored in FP32."""
    numel = len(blocks) * BLOCK_NUMEL
    values = torch.zeros(numel)
    fill(stored.of_parameter(slot, state, _elements(slot, blocks)), values)
    codes, scales = torch.empty(numel, dtype=torch.uint8), torch.empty(len(blocks))
    narrow(values, codes, scales, Scratch(numel, values.device), signed=is_signed(state))
    return codes, scales


def _widened(stored: StoredParameters, slot: Slot, state: str, blocks: range, fill: Fill) -> Tensor:
    """Return the FP32 values of blocks of a parameter whose state is stored as codes and scales."""
    numel = len(blocks) * BLOCK_NUMEL
    codes, scales = torch.zeros(numel, dtype=torch.uint8), torch.zeros(len(blocks))
    fill(stored.of_parameter(slot, CODES[state], _elements(slot, blocks)), codes)
    fill(stored.of_parameter(slot, ABSMAX[state], blocks), scales)
    return widened(state, codes, scales)
