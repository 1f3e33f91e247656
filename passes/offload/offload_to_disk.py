"""ZeRO-Infinity: move buffers that earlier passes moved to host memory to disk, and load them while ops use them.

The buffers that ``offload-optimizer``, ``offload-parameters`` and ``offload-activations`` have put in host memory get
their home on disk. Visits surround the ops that use them on the host, and the copies from and to the device: a ``load``
before, and a ``store`` of changes after. Large buffers are processed in pieces, so that visits need the memory of two
pieces, however large the buffers are. The load of the next piece and the store of the previous one overlap with the
work on a piece.

An update transfers each element once each way: master weights, states and averages are loaded once, updated, averaged
and rounded to 16 bits, and stored once.

Host memory is the cache of the disk: ``cache_bytes`` of these buffers stay in it. A step uses all of them in one order,
so the best replacement policy, Belady's, never replaces: the same buffers stay, those with the most transferred bytes
per step for each cached byte. Parameters, which the forward and the backward load, come before activations, and these
before buffers that only the update uses.

What ``offload-to-disk`` changes::

    + bound disk_staging ahead=0
    - buffer %a.momentum_buffer : f32[256] host state = momentum_buffer a @dp
    + buffer %a.momentum_buffer : f32[256] disk state = momentum_buffer a @dp
    + buffer %a.momentum_buffer.host : f32[256] host staging
    + load %a.momentum_buffer -> %a.momentum_buffer.host  stream=io
    + load %b.momentum_buffer -> %b.momentum_buffer.host  stream=io
    - !2 = optimizer_step momentum param=%a.param.host grad=%a.grad.host states=(%a.momentum_buffer) …
    + !4 = optimizer_step momentum param=%a.param.host.host grad=%a.grad.host states=(%a.momentum_buffer.host) …
    + wait !4  on=io
    + store %a.momentum_buffer.host -> %a.momentum_buffer  stream=io
    + release %a.momentum_buffer.host  stream=io
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

from zeroir.config.offload_places import (
    ACTIVATIONS,
    DISK_PIECE_NUMEL,
    KEPT_ON_DISK,
    OPTIMIZER,
    PARAMETERS,
)
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.contents import GRAD, PARAM, FlatContent
from zeroir.ir.program import Program
from zeroir.passes.base import NO_FACTS, Fact, Pass, listed
from zeroir.passes.common.pieces import PIECE_ALIGNMENT_NUMEL, in_pieces
from zeroir.passes.common.visits import DISK_TO_HOST, with_visits


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadToDisk(Pass):
    """Keep on disk the buffers in host memory of the ``optimizer``, the ``parameters`` and the ``activations``.

    ``piece_numel`` is the most elements of one buffer that are loaded or stored for one op. ``cache_bytes`` of whole
    buffers on each rank stay in host memory.
    """

    name: ClassVar[str] = "offload-to-disk"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    what: tuple[str, ...] = KEPT_ON_DISK
    piece_numel: int = DISK_PIECE_NUMEL
    cache_bytes: int = 0

    def __call__(self, program: Program) -> Program:
        """Return the program with these buffers on disk; unchanged if none of them is in host memory.

        Raises:
            UserError: if an option has an invalid value.
        """
        self._check_options()
        homes = {buffer.name for buffer in self._homes(program)}
        if self.cache_bytes and homes:
            homes -= _cached(self._on_disk(program, homes), homes, self.cache_bytes)
        return self._on_disk(program, homes) if homes else program

    def _on_disk(self, program: Program, homes: Collection[str]) -> Program:
        return with_visits(in_pieces(program, homes, self.piece_numel), homes, DISK_TO_HOST)

    def _check_options(self) -> None:
        for kind in self.what:
            if kind not in KEPT_ON_DISK:
                raise UserError(
                    f"The option `what` of `{self.name}` has {listed(KEPT_ON_DISK)}, separated by |, not `{kind}`."
                )
        if self.piece_numel <= 0 or self.piece_numel % PIECE_ALIGNMENT_NUMEL:
            raise UserError(
                f"The option `piece_numel` of `{self.name}` is a multiple of {PIECE_ALIGNMENT_NUMEL} above 0, not "
                f"{self.piece_numel}."
            )
        if self.cache_bytes < 0:
            raise UserError(
                f"The option `cache_bytes` of `{self.name}` is at least 0, not {self.cache_bytes}."
            )

    def _homes(self, program: Program) -> Iterator[Buffer]:
        """Yield the buffers to move, which are in host memory."""
        on_device = {
            (b.holds.flat, b.holds.quantity)
            for b in program.buffers
            if isinstance(b.holds, FlatContent) and b.space is Space.DEVICE
        }
        for buffer in program.buffers:
            if buffer.space is not Space.HOST:
                continue
            kind: str | None = None
            match buffer.holds:
                case None if buffer.role is Role.SAVED:
                    kind = ACTIVATIONS
                case FlatContent(quantity=quantity, flat=flat) if quantity != GRAD:
                    # Parameters that the host trains in addition to those on the device belong to the optimizer.
                    is_trained_here = quantity != PARAM or (flat, PARAM) in on_device
                    kind = OPTIMIZER if is_trained_here else PARAMETERS
                case _:
                    pass
            if kind in self.what:
                yield buffer


def _cached(program: Program, homes: Collection[str], cache_bytes: int) -> set[str]:
    """Return those of the buffers on disk in a program that stay in host memory: whole ones, as many as fit."""
    moved_bytes: Counter[str] = Counter()
    for op in program.step_ops():
        if isinstance(op, ops.Load | ops.Store):
            region = op.source if isinstance(op, ops.Load) else op.destination
            buffer = program.buffer_by_name[region.buffer]
            moved_bytes[buffer.name] += (
                region.local_numel(program.mesh) * buffer.dtype.itemsize_bytes
            )
    candidates = [buffer for buffer in program.buffers if buffer.name in homes]
    candidates.sort(key=lambda buffer: -moved_bytes[buffer.name] / buffer.size_bytes)
    cached: set[str] = set()
    for buffer in candidates:
        if buffer.size_bytes <= cache_bytes:
            cached.add(buffer.name)
            cache_bytes -= buffer.size_bytes
    return cached
