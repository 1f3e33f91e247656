"""Keep parameters in host memory: they visit the device where ops use them.

The flats of the units that ``units`` names, by default of all, have their home in host memory. Where parameters are
sharded, each gather has its shard on the device for as long as it reads it. Otherwise the flat, or as much of it as is
used, is on the device for each run of uses, as a gather would have it there. The transfers to the device run one use
ahead, on the stream ``copy_in``, beside the computation; the bound ``device_staging ahead=0`` keeps at most two uses'
parameters there. The update changes the parameters during a visit, and ``copy_out`` takes them home.

Where the update computes new parameters in host memory and copies them to the device (see ``offload-optimizer``), the
copy to the device is left out, and the parameters are written in their home. The buffers of modules stay on the device.

What ``offload-parameters`` changes::

    + bound device_staging ahead=0
    - buffer %a.param : f32[256] device param = param a @dp
    + buffer %a.param : f32[256] host param = param a @dp
    + buffer %a.param.device : f32[256] device staging
      section last_micro_step {
    + alloc %a.param.device  stream=copy_in
    + !0 = to_device %a.param -> %a.param.device  stream=copy_in
    - !0 = all_gather %a.param -> %a.full  comm=gather stream=gather
    + !2 = all_gather %a.param.device -> %a.full  comm=gather stream=gather
    + release %a.param.device  stream=gather
      section update {
    + !2 = optimizer_step momentum param=%a.param.device grad=%a.grad states=(%a.momentum_buffer) …
    + wait !2  on=copy_out
    + to_host %a.param.device -> %a.param  stream=copy_out
    + release %a.param.device  stream=copy_out
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common import rewrite
from zeroir.passes.common.units import check_patterns, matching
from zeroir.passes.common.visits import HOST_TO_DEVICE, with_visits


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParameters(Pass):
    """Keep the parameters of ``units``, by default of all, in host memory."""

    name: ClassVar[str] = "offload-parameters"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSAVED})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.ONE_DEVICE, Fact.ONE_AXIS, Fact.UPDATE_APART}
    )

    units: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            check_patterns(self.units, self.name)

    def __call__(self, program: Program) -> Program:
        """The program with the parameters at home in host memory."""
        units = None if self.units is None else matching(self.units, program, "--offload-units")
        homes = [
            name
            for name, flat in rewrite.param_buffers(program).items()
            if program.buffer_by_name[name].space is Space.DEVICE
            and (units is None or flat.unit in units)
        ]
        return with_visits(program, homes, HOST_TO_DEVICE)
