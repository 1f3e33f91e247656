"""Seeds of random ops and samples, as a pure function of call site, step and rank."""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1


def site_seed(seed: int, step: int, micro_step: int, rank: int, site: int) -> int:
    """Return the seed of one random call site in one micro-step of one rank: 0 ≤ seed < 2^63.

    ``step`` counts from 0. Equal arguments give equal seeds on every machine, so a resumed run draws the same numbers
    as an uninterrupted one, and a recomputed forward the same as the first.
    """
    return drawn(seed, step, micro_step, rank, site) >> 1


def drawn(*values: int) -> int:
    """Return a pseudo-random number of 64 bits for these integers in this order."""
    state = 0
    for value in values:
        state = _mix((state + value) & _MASK)
    return state


def _mix(value: int) -> int:
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) after one step of its sequence."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
