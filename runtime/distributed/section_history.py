"""The sections that a rank has run, from which waiting ranks notice that they run different things."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    STEP_SECTIONS,
    UPDATE,
)

_REMEMBERED: Final = 256
"""The entries of a history. Ranks meet in each of its sections, so they are never far apart."""
_LISTED: Final = 8
"""The most ranks that a sentence names."""

OTHER_PROGRAM: Final = "other program"
"""The entry for the change to another program, at which ranks also meet."""
BATCHES: Final = "batches"
"""The entry for the exchange by which ranks choose a program for the sizes of their batches."""
CHANGED_CODE: Final = "changed code"
"""The entry for a change of the user's code, for which ranks compile together."""

_COUNTED_ONCE: Final = frozenset((*STEP_SECTIONS, BATCHES))


class SectionEntry(NamedTuple):
    """A section that a rank started in a step, counted from 1; ``micro_steps`` of the step are done when it ends.

    ``change`` is a sentence without a full stop on changed code; ranks do the same whatever it says.
    """

    section: str
    step: int
    micro_steps: int
    change: str = ""

    def in_words(self) -> str:
        """Return what the rank did, as the predicate of a sentence."""
        micro_step = f"micro-step {self.micro_steps} of step {self.step}"
        did = {
            MICRO_STEP: f"took {micro_step}, with more to follow",
            LAST_MICRO_STEP: f"took {micro_step} as the last of the step",
            UPDATE: f"ended step {self.step} after micro-step {self.micro_steps}",
            EVALUATE: f"evaluated before step {self.step}",
            SAVE: f"saved before the end of step {self.step}",
            OTHER_PROGRAM: f"went on with another program in step {self.step}",
            BATCHES: f"went on to the next batch of step {self.step}",
            CHANGED_CODE: f"began to compile again in step {self.step} ({self.change})",
        }
        return did[self.section]


class SectionHistory:
    """The last sections of a rank, numbered from its first one. Any thread may read it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, SectionEntry]] = deque(maxlen=_REMEMBERED)
        self.count = 0

    def add(self, entry: SectionEntry) -> None:
        """Add the section that starts; a micro-step that is retried with another batch counts once."""
        if entry.section in _COUNTED_ONCE and entry in (each for _, each in self._last()):
            return
        self.count += 1
        self._entries.append((self.count, entry))

    def _last(self) -> Iterator[tuple[int, SectionEntry]]:
        """Yield the entries of the last micro-step: that of its batch and its own."""
        return islice(reversed(self._entries), 2)

    def encoded(self) -> str:
        """Return one line of text, which ``decoded`` reads."""
        return json.dumps([[number, *entry] for number, entry in tuple(self._entries)])


def decoded(line: str) -> Mapping[int, SectionEntry]:
    """Return the entries of an encoded history, by their numbers."""
    return {number: SectionEntry(*fields) for number, *fields in json.loads(line)}


def difference(histories: Mapping[int, Mapping[int, SectionEntry]]) -> str | None:
    """Return a sentence on the first section in which two ranks differ; None where no difference is known."""
    for number in sorted({number for history in histories.values() for number in history}):
        ranks: dict[SectionEntry, list[int]] = {}
        for rank, history in sorted(histories.items()):
            if number in history:
                ranks.setdefault(history[number]._replace(change=""), []).append(rank)
        if len(ranks) > 1:
            entries = {those[0]: histories[those[0]][number] for those in ranks.values()}
            what = [f"{_named(those)} {entries[those[0]].in_words()}" for those in ranks.values()]
            is_change = any(entry.section == CHANGED_CODE for entry in entries.values())
            return f"The ranks do different things: {', but '.join(what)}. {_IN_CODE if is_change else _IN_CALLS}"
    return None


_IN_CALLS: Final = (
    "Call the engine's methods on all ranks together, with equally many micro-steps in each step."
)
_IN_CODE: Final = (
    "Change it on all ranks before the same step; the value may be another one on each of them."
)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:_LISTED]))}{', …' * (len(ranks) > _LISTED)}"
