"""ZeRO-Infinity: what earlier passes have moved to host memory goes to disk, and the host has what it works on.

The buffers that ``offload-optimizer``, ``offload-parameters`` and ``offload-activations`` have put in host memory get
their home on disk. Around the ops that use them on the host, and the copies from and to the device, stand visits: a
``load`` before, a ``store`` after what changed. Large buffers are worked on in pieces, so that the memory for visits
is that of two pieces, however large they are. The load of the next piece and the store of the previous one run beside
the work on a piece.

An update moves each element once each way: master weights, states and averages are loaded once, updated, averaged and
rounded to 16 bits, and stored once.

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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zeroir.config.offload_fields import (
    ACTIVATIONS,
    DISK_PIECE_NUMEL,
    KEPT_ON_DISK,
    OPTIMIZER,
    PARAMETERS,
)
from zeroir.errors import UserError
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.contents import GRAD, PARAM, FlatContent
from zeroir.ir.program import Program
from zeroir.passes.base import NO_FACTS, Fact, Pass, listed
from zeroir.passes.common.pieces import PIECE_ALIGNMENT_NUMEL, in_pieces
from zeroir.passes.common.visits import DISK_TO_HOST, with_visits


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadToDisk(Pass):
    """Keep on disk what is in host memory of the ``optimizer``, the ``parameters`` and the ``activations``.

    ``piece_numel`` is the most elements of one buffer that are loaded or stored for one op.
    """

    name: ClassVar[str] = "offload-to-disk"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    what: tuple[str, ...] = KEPT_ON_DISK
    piece_numel: int = DISK_PIECE_NUMEL

    def __call__(self, program: Program) -> Program:
        """The program with these buffers on disk; as it was where none of them rests in host memory.

        Raises:
            UserError: where an option has no such value.
        """
        self._check_options()
        homes = frozenset(buffer.name for buffer in self._homes(program))
        if not homes:
            return program
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

    def _homes(self, program: Program) -> Iterator[Buffer]:
        """The buffers to move, which are in host memory."""
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
                    # The parameters that the host trains beside those on the device belong to the optimizer.
                    is_trained_here = quantity != PARAM or (flat, PARAM) in on_device
                    kind = OPTIMIZER if is_trained_here else PARAMETERS
                case _:
                    pass
            if kind in self.what:
                yield buffer
