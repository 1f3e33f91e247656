"""The choice whether the host's update begins before all gradients are checked: if a simulated step is then shorter.

Speculation takes host memory for a backup, and host time to copy it. So the program is lowered and simulated both ways.
If speculation is not faster, or the host lacks the memory, the update waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zeroir.api.search.candidates import CandidateMeasurer
from zeroir.config import CompileOptions
from zeroir.cost.machine import Machine, load_machine
from zeroir.ir import ops
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.limits import MOST_BYTES
from zeroir.ir.program import Program
from zeroir.report.costs import format_seconds

DEFAULT_MACHINE: Final = "dgx-h100"
"""The default machine for simulated steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationChoice:
    """Simulated steps in nanoseconds on a machine: one whose update waits, and one whose update is speculative.

    ``missing_host_bytes`` is the memory that the host of a rank lacks for the latter.
    """

    machine: str
    waiting_ns: int
    speculating_ns: int
    missing_host_bytes: int

    @property
    def speculates(self) -> bool:
        """Whether the update begins before the gradients are checked."""
        return not self.missing_host_bytes and self.speculating_ns < self.waiting_ns

    def in_words(self) -> str:
        """Describe the choice and its reason."""
        speculating, waiting = (
            format_seconds(step_ns / 1e9) for step_ns in (self.speculating_ns, self.waiting_ns)
        )
        if self.speculates:
            return (
                "The host's update begins before clipping or loss scaling has decided: on "
                f"{self.machine} a simulated step takes {speculating}, and {waiting} if the update waits."
            )
        waits = "The host's update waits for clipping or loss scaling to decide: "
        if self.missing_host_bytes:
            missing = format_bytes(self.missing_host_bytes)
            return f"{waits}on {self.machine} the host of each rank lacks {missing} for it to begin before."
        on_machine = f"on {self.machine} a simulated step takes {waiting}"
        return f"{waits}{on_machine}, and {speculating} if the update begins before."


def choose(
    logical: Program, options: CompileOptions, machine: Machine | None = None
) -> SpeculationChoice | None:
    """Make the choice for a program whose options leave it open; None if they do not."""
    if not options.may_speculate:
        return None
    machine = load_machine(DEFAULT_MACHINE) if machine is None else machine
    measurer = CandidateMeasurer(logical, options, MOST_BYTES, machine)
    speculating = measurer.simulated({"speculate": True})
    if not any(isinstance(op, ops.CommitStep) for op in speculating.program.ops()):
        return None
    return SpeculationChoice(
        machine=machine.name,
        waiting_ns=measurer.simulated({"speculate": False}).simulation.step_ns,
        speculating_ns=speculating.simulation.step_ns,
        missing_host_bytes=speculating.missing_host_bytes,
    )
