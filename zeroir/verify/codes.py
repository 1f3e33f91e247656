"""The codes of the verifier's laws: what each rules out, and the usual remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The title of a law, which says what it rules out, and the usual remedy, as one sentence."""

    title: str
    remedy: str


STRUCTURE: Final[Mapping[str, Law]] = {
    "Z001": Law(
        title="undeclared name",
        remedy="Declare the name in the header, or use one that is declared.",
    ),
    "Z002": Law(
        title="duplicate name",
        remedy="Give each buffer, segment, section, flat, axis, stream, communicator and event its own name.",
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
        remedy="Allocate and release temporary buffers only, those without a resting content.",
    ),
    "Z008": Law(
        title="malformed declaration or state",
        remedy="Make the declaration agree with the flats, the mesh and the buffers that it names.",
    ),
    "Z009": Law(
        title="the states of two sections differ where they meet",
        remedy="Make the exit state of a section equal to the entry state of the next section.",
    ),
    "Z010": Law(
        title="overlap within one op",
        remedy="Write each element once, and give in-place collectives exactly matching regions.",
    ),
    "Z011": Law(
        title="beyond a limit",
        remedy="Compile the model again: no model comes near these limits.",
    ),
}

LAWS: Final[Mapping[str, Law]] = {
    "Z101": Law(
        title="use after release, or before alloc",
        remedy="Order the use between alloc and release: move the op, or add an event and a wait.",
    ),
    "Z102": Law(
        title="double gather",
        remedy="Drop the second gather: its destination already holds the content.",
    ),
    "Z103": Law(
        title="read without a wait, or before the first write",
        remedy="Let the op that writes signal an event, and wait for it on the stream of the read.",
    ),
    "Z104": Law(
        title="leak",
        remedy="Release the buffer after its last use, or name it in the exit state.",
    ),
    "Z105": Law(
        title="race",
        remedy="Let the first op signal an event, and wait for it on the stream of the second.",
    ),
    "Z106": Law(
        title="two live buffers share memory",
        remedy="Run `plan-memory` again, or drop the offsets: then the runtime plans the memory.",
    ),
    "Z201": Law(
        title="collectives differ between ranks",
        remedy="Let every rank issue the same collectives with sizes that fit the axis.",
    ),
    "Z202": Law(
        title="wait for an event that nothing signals, or unordered collectives",
        remedy="Issue the op that signals the event before the wait, or order the collectives by events.",
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
        title="a compute op does not read the current, whole parameter",
        remedy="Gather or cast the parameter before the op, and let no other op overwrite it.",
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
        title="an update without the decision that it depends on",
        remedy="Compute the statistics of final gradients, combine them over the ranks, decide, and then update.",
    ),
    "Z406": Law(
        title="other values than in the logical program",
        remedy="Let the schedule compute each gradient from the same values as the logical program.",
    ),
    "Z407": Law(
        title="a save that does not copy the present state",
        remedy="Let section `save` copy every buffer that training goes on from, each to a snapshot of its own.",
    ),
    "Z408": Law(
        title="the engine would report another value",
        remedy="Let the buffer of each report hold what it is named for when the section before it is read ends.",
    ),
    "Z501": Law(
        title="a page used before it arrived",
        remedy="Transfer the page to its slot first, and wait for the transfer on the stream of the op.",
    ),
    "Z502": Law(
        title="a changed page dropped",
        remedy="Copy the page back to where it rests, and wait for the copy before its slot is released or filled.",
    ),
    "Z503": Law(
        title="more live pages than slots",
        remedy="Wait for the release of an earlier page before the next one begins, or raise the bound on pages.",
    ),
}

CODES: Final[Mapping[str, Law]] = {**STRUCTURE, **LAWS}
