"""The search of a plan: the space of choices for a logical program on a machine, their results, and why others lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from zeroir.api.search.adaptive import least_offload, movable_units, possible_kinds
from zeroir.api.search.candidates import Candidate, CandidateMeasurer
from zeroir.api.search.search_space import (
    SearchRegion,
    page_amount,
    regions,
    with_disk,
    with_offload,
    with_pages,
    words,
)
from zeroir.config import CompileOptions
from zeroir.config.offload_places import OFFLOADED, PAGE_BYTES
from zeroir.config.searched import Value
from zeroir.cost.machine import Machine
from zeroir.cost.search import Found, Point, SearchOutcome, search
from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.ir.byte_sizes import format_bytes, parse_bytes
from zeroir.ir.program import Program
from zeroir.report.costs import format_seconds

MOST_TRIED: Final = 500
"""The default limit of the choices that a search tries."""

_LAST_RESORTS: Final = tuple(
    name
    for name, row in CompileOptions.rows().items()
    if row.option.searched is not None and row.option.searched.is_last_resort
)
"""If one of these is given, the search keeps it, and chooses no other."""

Identity = tuple[tuple[str, Value], ...]
"""Settings as a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A choice that lost, and the reason in words."""

    candidate: Candidate
    why: str


class NothingFitsError(UserError):
    """No choice fits the memory; ``closest`` lacks the least."""

    def __init__(self, sentence: str, closest: Candidate) -> None:
        super().__init__(sentence)
        self.closest = closest


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The outcome of a search, before the chosen program is compiled; see ``Plan``."""

    chosen: Candidate
    alternatives: tuple[Alternative, ...]
    tried: int
    bound_ns: int
    is_finished: bool


class Planner:
    """The space of choices for a logical program on a machine, and their results.

    What is set in ``options`` is kept, and the rest is chosen.
    """

    def __init__(
        self,
        logical: Program,
        options: CompileOptions,
        machine: Machine,
        budget_bytes: int,
        at: Mapping[str, int] = {},
    ) -> None:
        self._machine = machine
        self._budget_bytes = budget_bytes
        self._selects_saved = options.recompute.select_saved
        self.measurer = CandidateMeasurer(logical, options, budget_bytes, machine, at)
        self._wire_ns: dict[int, int] = {}
        self._candidates: dict[tuple[int, Point], Candidate] = {}
        self._measured: dict[CompileOptions, tuple[Candidate, SearchOutcome]] = {}
        self._is_offload_free = options.given.keys().isdisjoint(_LAST_RESORTS)
        self._movable = movable_units(logical)
        self._world_size = options.world_size
        self._state_bytes = sum(b.size_bytes for b in logical.buffers if b.role is Role.STATE)
        self.regions = regions(options, logical)

    def search(self, most_tried: int = MOST_TRIED) -> SearchResult:
        """Find the best choice.

        Raises:
            NothingFitsError: if no choice fits; the message names the closest one, and the bytes that it lacks.
        """
        searched = self._searched(most_tried)
        if self._is_offload_free and is_limited_by_memory(searched):
            kinds = possible_kinds(self._measure, OFFLOADED)
            if kinds:
                # Repeated choices cost nothing: they are found as ones that offload nothing.
                self.regions = with_offload(self.regions, kinds)
                searched = self._searched(most_tried)
            paged = with_pages(self.regions, self._world_size, self._state_bytes)
            if paged != self.regions and self._can_page(paged):
                self.regions = paged
                searched = self._searched(most_tried)
            if self._is_limited_by_host:
                self.regions = with_disk(self.regions)
                searched = self._searched(most_tried)
        families = [region.family for region in self.regions]
        at = searched.winner, searched.best[searched.winner]
        chosen = self._with_less_offload(self._candidates[at])
        chosen = self._with_more_resident(chosen, self.regions[at[0]])
        if chosen.step_ns is None:
            raise NothingFitsError(
                f"Nothing fits {format_bytes(self._budget_bytes)}: {self._closest(chosen)}", chosen
            )
        # Two points may name the same units, counted from either end.
        losers: dict[Identity, tuple[int, Point]] = {}
        for key in sorted(searched.tried, key=lambda key: (searched.tried[key].key, key)):
            is_best_or_beside = key[1] == searched.best[key[0]] or _is_beside(key, at)
            if is_best_or_beside and self._candidates[key].settings != chosen.settings:
                losers.setdefault(_identity(self._candidates[key].settings), key)
        cut_off = {number: self.bound_ns(number, None) for number in searched.cut_off}
        return SearchResult(
            chosen=chosen,
            alternatives=tuple(
                Alternative(
                    candidate=self._candidates[key],
                    why=self._why(self._candidates[key], chosen.step_ns, cut_off.get(key[0])),
                )
                for key in losers.values()
            ),
            tried=len({_identity(self._candidates[key].settings) for key in searched.tried}),
            bound_ns=min(
                self.bound_ns(number, None)
                for number, family in enumerate(families)
                if not searched.tried[number, family.starts[0]].is_hopeless
            ),
            is_finished=searched.is_finished,
        )

    def _searched(self, most_tried: int) -> Found:
        families = [region.family for region in self.regions]
        return search(families, self.evaluate, self.bound_ns, most_tried=most_tried)

    @property
    def _is_limited_by_host(self) -> bool:
        """Whether a choice was tried that lacks only host memory."""
        return any(
            candidate.missing_host_bytes == outcome.missing_bytes > 0
            for candidate, outcome in self._measured.values()
        )

    def _measure(self, settings: Mapping[str, Value]) -> tuple[Candidate, SearchOutcome]:
        """Measure a choice; one that offloads nothing is the same as one that does not mention it."""
        options = self.measurer.options(settings)
        if options not in self._measured:
            self._measured[options] = self.measurer.measure(settings)
        candidate, outcome = self._measured[options]
        return replace(candidate, settings=settings), outcome

    def _with_less_offload(self, chosen: Candidate) -> Candidate:
        """Return the choice with as few units offloaded as memory allows, if that is as fast."""
        offloaded = chosen.settings.get("offload")
        if chosen.step_ns is None or not isinstance(offloaded, tuple) or not offloaded:
            return chosen

        def measure(settings: Mapping[str, Value]) -> tuple[Candidate, SearchOutcome]:
            return self._measure({**chosen.settings, "offload": (), **settings})

        units = {kind: self._movable[kind] for kind in offloaded}
        candidate, _ = measure(least_offload(measure, units, is_timed=True))
        is_faster = candidate.step_ns is not None and candidate.step_ns <= chosen.step_ns
        return candidate if is_faster else chosen

    def _can_page(self, regions: Sequence[SearchRegion]) -> bool:
        """Return whether the optimizer's states can be paged, which the pass refuses for some programs."""
        region = next(region for region in regions if region.values("page_optimizer"))
        amount = region.values("page_optimizer")[-1]
        try:
            self._measure({"stage": region.stage, "mesh": region.mesh, "page_optimizer": amount})
        except UserError:
            return False
        return True

    def _with_more_resident(self, chosen: Candidate, region: SearchRegion) -> Candidate:
        """Return the choice with as many pages on the device as memory allows, if that is as fast."""
        amount = chosen.settings.get("page_optimizer")
        if chosen.step_ns is None or not isinstance(amount, str):
            return chosen
        page_bytes = parse_bytes(PAGE_BYTES)
        fitting = parse_bytes(amount) // page_bytes
        excessive = self._state_bytes // region.shards(self._world_size) // page_bytes + 1
        while excessive - fitting > 1:
            pages = (fitting + excessive) // 2
            candidate, outcome = self._measure(
                {**chosen.settings, "page_optimizer": page_amount(pages)}
            )
            if not outcome.fits:
                excessive = pages
                continue
            fitting = pages
            if candidate.step_ns is not None and candidate.step_ns <= (chosen.step_ns or 0):
                chosen = candidate
        return chosen

    def evaluate(self, number: int, point: Point) -> SearchOutcome:
        """Lower a choice of a region, measure it, and simulate it."""
        settings = self.regions[number].settings(point)
        self._candidates[number, point], evaluation = self._measure(settings)
        for name in _LAST_RESORTS:
            values = self.regions[number].values(name)
            if values and settings.get(name, values[-1]) != values[-1]:
                evaluation = replace(evaluation, is_hopeless=False)
        if point == self.regions[number].family.starts[0]:
            # Now, while its lowered program is still cached.
            self._wire_bound_ns(number)
        return evaluation

    def bound_ns(self, number: int, point: Point | None) -> int:
        """Return a lower bound of the step of a choice, or of every choice of a region.

        The segments depend on the saved and recomputed values and not on the schedule, and recomputing a unit only adds
        to them. Communication is least if no unit is gathered twice without need.
        """
        region = self.regions[number]
        if point is None:
            start = region.settings(region.family.starts[0])
            return min(
                self._bound_ns(number, {**start, "select_saved": value})
                for value in region.values("select_saved") or (self._selects_saved,)
            )
        return self._bound_ns(number, region.settings(point))

    def _bound_ns(self, number: int, settings: Mapping[str, Value]) -> int:
        compute_ns = self.measurer.compute_bound_ns(settings, self._machine)
        return max(compute_ns, self._wire_bound_ns(number))

    def _wire_bound_ns(self, number: int) -> int:
        """Return a lower bound of the step of every choice of a region, from its communication."""
        if number not in self._wire_ns:
            start = self.regions[number].settings(self.regions[number].family.starts[0])
            self._wire_ns[number] = self.measurer.wire_bound_ns(start, self._machine)
        return self._wire_ns[number]

    def _closest(self, best: Candidate) -> str:
        """Describe the closest choice, or that persistent buffers alone exceed the memory."""
        least = min(self._candidates.values(), key=lambda candidate: candidate.resting_bytes)
        if least.resting_bytes <= self._budget_bytes:
            remedy = "Use more ranks, a lower precision or a smaller batch"
            remedy += "; --largest-batch finds one." if self.measurer.has_dims else "."
            return f"the closest is {words(best.settings)}, which {self._lack(best)}. {remedy}"
        mesh = least.settings["mesh"]
        return (
            "the persistent buffers of a rank, such as parameters and optimizer states, take "
            f"{format_bytes(least.resting_bytes)} at least, at stage {least.settings['stage']}"
            f"{'' if mesh is None else f' with --mesh {mesh}'}. Use more ranks or a lower precision."
        )

    def _lack(self, candidate: Candidate) -> str:
        if candidate.needed_bytes <= self._budget_bytes and candidate.missing_host_bytes:
            missing = format_bytes(candidate.missing_host_bytes)
            return f"keeps {format_bytes(candidate.host_bytes)} of each rank on the host, {missing} too many"
        missing = format_bytes(candidate.needed_bytes - self._budget_bytes)
        needed = format_bytes(candidate.needed_bytes)
        return f"needs at least {needed}, {missing} too many, most {candidate.culprit}"

    def _why(self, candidate: Candidate, best_ns: int, cut_off_ns: int | None) -> str:
        if candidate.step_ns is None:
            return f"does not fit: {self._lack(candidate)}"
        slower = candidate.step_ns / best_ns - 1
        what, share = candidate.bounded_by[0]
        text = f"{slower:.1%} slower" if slower >= 0.0005 else "as fast"
        text += f", bound by {what} ({share:.0%} of the step)"
        if cut_off_ns is not None:
            text += f"; at this stage and mesh no step is below {format_seconds(cut_off_ns / 1e9)}"
        return text


def is_limited_by_memory(searched: Found) -> bool:
    """Return whether a choice that does not fit is faster than the best that fits, or nothing fits."""
    best = searched.tried[searched.winner, searched.best[searched.winner]]
    return not best.fits or any(
        outcome.step_ns < best.step_ns for outcome in searched.tried.values() if not outcome.fits
    )


def _identity(settings: Mapping[str, Value]) -> Identity:
    return tuple(settings.items())


def _is_beside(key: tuple[int, Point], at: tuple[int, Point]) -> bool:
    """Return whether two points of a family differ along exactly one axis."""
    same_family = key[0] == at[0]
    return same_family and sum(a != b for a, b in zip(key[1], at[1], strict=True)) == 1
