"""Visits the states of a system: which tasks are under way at once, and whether the ranks can come to a stop.

A step of a queue needs least counts of queues, and counts only grow. So no step makes another one impossible, and if a
state is reachable, so is the one in which some queues have gone on as far as they can while the others stand still.
This is what makes it sound to branch over the steps of *watched* queues alone, while all others do each step as soon as
they can: whatever counts of the watched queues are reachable in the whole system are visited. A race is between two
queues of one rank; so it suffices to watch one rank after the other, or even each two queues of one. Where ranks can
stop, each order of steps comes to the same stop. (That collectives meet by number supposes that those of a communicator
have one order on each rank; any two that may be under way at once count as a race.)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tools.protocol.system import NEVER, System

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two tasks: the queue of each, and its place there."""


@dataclass
class Visited:
    """The number of states, the pairs of tasks of a rank that some state has under way, and where no step is possible.

    ``peaks`` are the most bytes of temporary buffers that live at once on the watched queues, by kind.
    """

    states: int = 0
    pairs: set[Pair] = field(default_factory=set)
    stop: str = ""
    peaks: dict[str, int] = field(default_factory=dict)


def visit(system: System, watched: Collection[int], most: int = 10**9) -> Visited:
    """Visit every state of the watched queues, up to ``most``; all other queues do each step as soon as they can."""
    needs = [queue.needs for queue in system.queues]
    ends = tuple(map(len, needs))
    ranks = [queue.rank for queue in system.queues]
    own = [i for i in watched if ends[i]]
    others = [i for i in range(len(needs)) if ends[i] and i not in watched]

    def can(counts: Sequence[int], i: int) -> bool:
        at = counts[i]
        if at == ends[i]:
            return False
        for queue, least in needs[i][at]:  # noqa: SIM110 - a generator would take most of the time
            if counts[queue] < least:
                return False
        return True

    def settled(counts: list[int]) -> tuple[int, ...]:
        goes_on = True
        while goes_on:
            goes_on = False
            for i in others:
                while can(counts, i):
                    counts[i] += 1
                    goes_on = True
        return tuple(counts)

    lives = _lives(system, own)
    found = Visited()
    first = settled([0] * len(needs))
    seen, todo = {first}, [first]
    while todo and len(seen) <= most:
        counts = todo.pop()
        under_way = [(i, counts[i] >> 1) for i in own if counts[i] & 1]
        for one, other in itertools.combinations(under_way, 2):
            if ranks[one[0]] == ranks[other[0]]:
                found.pairs.add((one, other))
        for kind, of_queues in lives.items():
            live = sum(of_queues[i][counts[i]] for i in of_queues)
            if live > found.peaks.get(kind, 0):
                found.peaks[kind] = live
        possible = [i for i in own if can(counts, i)]
        for i in possible:
            following = list(counts)
            following[i] += 1
            state = settled(following)
            if state not in seen:
                seen.add(state)
                todo.append(state)
        if not possible and counts != ends:
            found.stop = _stop(system, counts)
    found.states = len(seen)
    return found


def _lives(system: System, watched: Sequence[int]) -> dict[str, dict[int, list[int]]]:
    """Return the bytes of buffers that a queue has begun and not ended, by kind, queue and count."""
    found: dict[str, dict[int, list[int]]] = {}
    for i in watched:
        tasks = system.queues[i].tasks
        for kind in {task.life[0] for task in tasks if task.life[0]}:
            live = [0]
            for task in tasks:
                change = task.life[1] if task.life[0] == kind else 0
                live += [live[-1] + max(change, 0), live[-1] + change]
            found.setdefault(kind, {})[i] = live
    return found


def _stop(system: System, counts: Sequence[int]) -> str:
    """Say what each queue with a collective under way waits for, where no step is possible."""
    waiting = []
    for queue, at in zip(system.queues, counts, strict=True):
        if at & 1 and at < len(queue.needs):
            is_other = any(least == NEVER for _, least in queue.needs[at])
            why = "meets another collective" if is_other else "waits for other ranks"
            waiting.append(f"{queue.tasks[at >> 1].what} of rank {queue.rank} {why}")
    return f"deadlock: {'; '.join(waiting) or 'all streams wait'}"


def races(system: System, found: Visited) -> Iterator[str]:
    """Yield a sentence for each two tasks that were under way at once and must not be."""
    for one, other in sorted(found.pairs):
        memory = system.conflict(one, other)
        if memory is not None:
            a, b = (system.queues[queue].tasks[at].what for queue, at in (one, other))
            yield f"race: {a} and {b} use {memory} at once"


def first_finding(system: System) -> str | None:
    """Return what is wrong: the first that a search finds."""
    if stop := visit(system, ()).stop:
        return stop
    for rank in sorted({queue.rank for queue in system.queues}):
        for pair in itertools.combinations(system.queues_of(rank), 2):
            if system.may_conflict(*pair):
                race = next(races(system, visit(system, pair)), None)
                if race is not None:
                    return race
    return None
