"""Where a rank is in its program, as it tells the other ranks of its job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """A place in the course of a job: later places of any rank have a greater ``order``; ``text`` says it in words.

    The order is that of the step, its micro-steps done, the section and the op; ranks issue the same ops.
    """

    order: tuple[int, int, int, int]
    text: str

    def encoded(self) -> str:
        """One line, which ``decoded`` reads."""
        return f"{' '.join(map(str, self.order))} {self.text}"

    @classmethod
    def decoded(cls, line: str) -> Self | None:
        """The whereabouts of a line; None where it has none."""
        step, micro_steps, section, op, text = (line.split(" ", 4) + [""] * 5)[:5]
        if not text:
            return None
        return cls(order=(int(step), int(micro_steps), int(section), int(op)), text=text)


def behind(present: list[Whereabouts | None]) -> str | None:
    """A sentence on the ranks that are behind the others, by the whereabouts of each rank; None where none is."""
    known = [(place.order, rank) for rank, place in enumerate(present) if place is not None]
    if not known or min(known)[0] == max(known)[0]:
        return None
    first, _ = min(known)
    last = [rank for order, rank in known if order == first]
    place = present[last[0]]
    assert place is not None
    who = (
        f"Rank {last[0]} is"
        if len(last) == 1
        else f"Ranks {', '.join(map(str, last[:8]))}{', …' if len(last) > 8 else ''} are"
    )
    return f"{who} behind the others: {place.text}."
