"""The codes of the verifier: what each rules out, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What a code rules out, in a few words, and the usual remedy, as one sentence."""

    title: str
    remedy: str


STRUCTURE: Final[Mapping[str, Law]] = {
    "Z001": Law(
        title="undeclared name",
        remedy="Declare the name in the header, or use one that is declared.",
    ),
    "Z002": Law(
        title="duplicate name",
        remedy="Give each buffer, segment, section, flat, axis, stream, comm and event its own name.",
    ),
    "Z003": Law(
        title="region out of bounds or not divisible",
        remedy="Keep regions inside their buffers and cut them only by axes that divide them.",
    ),
    "Z004": Law(
        title="dtype mismatch",
        remedy="Insert a cast, or declare the buffer with the dtype that the op needs.",
    ),
    "Z005": Law(
        title="shape or arity mismatch",
        remedy="Bind every input and output of the segment to a view of its own type.",
    ),
    "Z006": Law(
        title="wrong space",
        remedy="Move the data with to_host, to_device, load or store first.",
    ),
    "Z007": Law(
        title="alloc or release of a persistent buffer",
        remedy="Only temporary buffers (those without a resting content) begin and end.",
    ),
    "Z008": Law(
        title="malformed declaration or state",
        remedy="Make the declaration agree with the flats, the mesh and the buffers it speaks of.",
    ),
    "Z009": Law(
        title="sections do not join",
        remedy="Let the exit state of a section equal the entry state of the one that follows it.",
    ),
    "Z010": Law(
        title="overlap within one op",
        remedy="Let an op write each element once; in-place collectives use exactly matching regions.",
    ),
    "Z011": Law(
        title="beyond a limit",
        remedy="Compile the model again: no program of a model comes near these limits.",
    ),
}

LAWS: Final[Mapping[str, Law]] = {
    "Z101": Law(
        title="use after release, or before alloc",
        remedy="Order the use between alloc and release: move the op, or add an event and a wait.",
    ),
    "Z102": Law(
        title="double gather",
        remedy="Drop the second gather: its destination holds the content already.",
    ),
    "Z103": Law(
        title="read before wait, or before anything was written",
        remedy="Let the producer signal an event and wait for it on the stream that reads.",
    ),
    "Z104": Law(
        title="leak",
        remedy="Release the buffer after its last use, or name it in the exit state.",
    ),
    "Z105": Law(
        title="race",
        remedy="Signal an event after the first op and wait for it on the stream of the second.",
    ),
    "Z106": Law(
        title="two live buffers in one place",
        remedy="Plan the memory anew (`plan-memory`), or leave the offsets out: then the runtime plans it.",
    ),
    "Z201": Law(
        title="collectives differ between ranks",
        remedy="Let every rank issue the same collectives with sizes that fit the axis.",
    ),
    "Z202": Law(
        title="wait on an event not yet issued, or unordered communicators",
        remedy="Issue the op that signals the event before the wait; order the collectives by events.",
    ),
    "Z301": Law(
        title="over the memory budget",
        remedy="Release earlier, prefetch less, or choose a higher stage, offload or recompute.",
    ),
    "Z302": Law(
        title="more may be live than a bound allows",
        remedy="Wait for the release that the bound asks for before the buffer begins, or drop the bound.",
    ),
    "Z401": Law(
        title="a compute op reads anything but the current full parameter",
        remedy="Gather or cast the parameter before the op, and keep others from overwriting it.",
    ),
    "Z402": Law(
        title="a gradient element is not summed exactly once",
        remedy="Let the first contribution write and each later one accumulate, then reduce once.",
    ),
    "Z403": Law(
        title="an element is not updated exactly once",
        remedy="Step each trainable element once, then cast and gather it to every persistent copy.",
    ),
    "Z404": Law(
        title="the update reads an unreduced gradient",
        remedy="Reduce the gradient over every mesh axis after its last contribution.",
    ),
    "Z405": Law(
        title="an update before the decision it depends on",
        remedy="Compute the statistics on final gradients, reduce them, decide, and only then step.",
    ),
    "Z406": Law(
        title="not the values of the logical program",
        remedy="Let the schedule compute each gradient from what the logical program computes it from.",
    ),
}

CODES: Final[Mapping[str, Law]] = {**STRUCTURE, **LAWS}
