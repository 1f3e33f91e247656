"""The position of a rank in its program, which it sends to the other ranks of its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """A position of a rank in a job: later positions of any rank have a greater ``order``; ``text`` says it in words.

    The order consists of the step, its micro-steps done, the section and the op; all ranks issue the same ops.
    """

    order: tuple[int, int, int, int]
    text: str

    def encoded(self) -> str:
        """Return one line of text, which ``decoded`` reads."""
        return f"{' '.join(map(str, self.order))} {self.text}"

    @classmethod
    def decoded(cls, line: str) -> Self | None:
        """Return the position that a line encodes; None where there is none."""
        step, micro_steps, section, op, text = (line.split(" ", 4) + [""] * 5)[:5]
        if not text:
            return None
        return cls(order=(int(step), int(micro_steps), int(section), int(op)), text=text)


def rank_name(rank: int, hosts: Sequence[str]) -> str:
    """Return a rank's name for messages: with its machine where the job has several.

    ``hosts`` has that of each rank.
    """
    return f"Rank {rank} on {hosts[rank]}" if len(set(hosts)) > 1 else f"Rank {rank}"


_LISTED: Final = 8
"""The most machines, and the most ranks of one machine, that a message names."""


def ranks_by_host(hosts: Sequence[str], *, only: str | None = None) -> str:
    """Return the machines and their ranks as ``alpha (ranks 0, 1), beta (rank 2)``, or ``only`` one of them."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        if only in (None, host):
            ranks.setdefault(host, []).append(rank)
    shown = [
        f"{host} (rank{'s' * (len(of_host) > 1)} {', '.join(map(str, of_host[:_LISTED]))}"
        f"{', …' * (len(of_host) > _LISTED)})"
        for host, of_host in ranks.items()
    ]
    return ", ".join(shown[:_LISTED]) + ", …" * (len(shown) > _LISTED)


def behind(present: Sequence[RankPosition | None], hosts: Sequence[str] = ()) -> str | None:
    """Return a sentence on the ranks that are behind the others, by the position of each rank; None where none is."""
    known = [(place.order, rank) for rank, place in enumerate(present) if place is not None]
    if not known or min(known)[0] == max(known)[0]:
        return None
    first, _ = min(known)
    last = [rank for order, rank in known if order == first]
    place = present[last[0]]
    assert place is not None
    who = (
        f"{rank_name(last[0], hosts)} is"
        if len(last) == 1
        else f"Ranks {', '.join(map(str, last[:8]))}{', …' if len(last) > 8 else ''} are"
    )
    return f"{who} behind the others: {place.text}."
