"""What a program keeps outside device memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from zeroir.config.field_types import Amount, Names, OptionalAmount
from zeroir.config.offload_places import (
    DISK,
    HOST,
    KEPT_ON_DISK,
    OFFLOAD_SETS,
    PAGE_BYTES,
    are_places,
    disk_folders,
    in_canonical_order,
    is_whole_blocks,
    named_places,
    pairs_as_text,
    place_of,
)
from zeroir.config.searched import Searched
from zeroir.config.table import Option, OptionObject
from zeroir.ir.byte_sizes import parse_bytes

_GROUP = "Offloading"


class Offload(OptionObject):
    """What is kept in host memory or on a disk, and copied to the device and back.

    ``what`` are kinds: optimizer, gradients, parameters, activations; or adaptive alone, for what exceeds the memory
    budget. ``to`` is ``host``, ``disk:FOLDER``, or a mapping from kinds to these. ``units`` are patterns of the names
    of the units of which something is offloaded, and ``fraction`` is the share of the optimizer's elements.
    ``host_cache`` is memory of the host that keeps a part of what would be on disk. ``speculate`` begins the host's
    update before clipping or loss scaling has decided about it. ``page_optimizer`` is the device memory for pages of
    the optimizer's states, of ``page_bytes`` each. ``memory_budget`` is the device memory in which the program has to
    fit, whatever is offloaded.
    """

    what: Annotated[
        Names,
        AfterValidator(in_canonical_order),
        Option(
            name="offload",
            group=_GROUP,
            help="What is kept outside device memory and copied there and back: optimizer, gradients, parameters, "
            "activations, separated by commas; or adaptive: what exceeds --memory-budget and no more.",
            is_of_run=True,
            searched=Searched(values=OFFLOAD_SETS, is_last_resort=True, words="offload {value}"),
            is_of_estimate=True,
        ),
    ] = ()
    to: Annotated[
        str,
        BeforeValidator(pairs_as_text),
        AfterValidator(are_places),
        Option(
            name="offload_to",
            group=_GROUP,
            help="Where it is kept: host (memory of the CPU), or disk:FOLDER, with host memory as the cache of the "
            "disk; gradients stay in host memory. Or a place for each kind: optimizer=disk:FOLDER,parameters=host.",
            is_of_run=True,
            searched=Searched(values=(HOST, DISK), is_last_resort=True, off=HOST),
            is_of_estimate=True,
        ),
    ] = HOST
    units: Annotated[
        Names,
        Option(
            name="offload_units",
            group=_GROUP,
            help="Units of which something is offloaded: names or patterns; * means all repeated units. A pattern such "
            "as activations:blocks.* is for one kind. [default: every unit]",
            is_of_run=True,
            searched=Searched(is_last_resort=True),
        ),
    ] = ()
    fraction: Annotated[
        float | None,
        Field(gt=0, le=1),
        Option(
            name="offload_fraction",
            group=_GROUP,
            help="Share of the optimizer's elements that is offloaded; the units whose gradients come last stay on the "
            "device. [default: 1]",
            is_of_run=True,
            is_of_estimate=True,
        ),
    ] = None
    host_cache: Annotated[
        OptionalAmount,
        Option(
            group=_GROUP,
            help="Host memory of a rank, such as 64GiB, that keeps a part of what would be on disk: what a step would "
            "load and store most often (--offload-to disk). [default: only what is worked on]",
            is_of_run=True,
        ),
    ] = None
    page_optimizer: Annotated[
        OptionalAmount,
        Option(
            group=_GROUP,
            help="Device memory for pages of the optimizer's states, such as 2GiB; the other pages wait in host "
            "memory, and the update runs page by page. [default: no pages]",
            is_of_run=True,
            searched=Searched(is_last_resort=True, words="pages of the optimizer in {value}"),
            is_of_estimate=True,
        ),
    ] = None
    page_bytes: Annotated[
        Amount,
        AfterValidator(is_whole_blocks),
        Option(
            group=_GROUP,
            help="Size of a page, such as 512KiB (--page-optimizer).",
            is_of_run=True,
            is_of_estimate=True,
        ),
    ] = PAGE_BYTES
    memory_budget: Annotated[
        OptionalAmount,
        Option(
            group="Memory",
            help="Device memory of a rank, such as 80GB: a program that needs more is refused (Z301). "
            "[default: no budget]",
        ),
    ] = None
    speculate: Annotated[
        bool | None,
        Option(
            group=_GROUP,
            help="Begin the host's update before clipping or loss scaling has decided about it, and undo it where that "
            "decides otherwise; takes host memory (--offload optimizer with --clip or fp16). [default: where a "
            "simulated step is faster]",
        ),
    ] = None

    @property
    def is_to_disk(self) -> bool:
        """Whether a disk keeps something that is offloaded, and host memory is its cache."""
        return any(place != HOST for place in (named_places(self.to).values() or (self.to,)))

    @property
    def kept_on_disk(self) -> tuple[str, ...]:
        """The kinds that are kept on a disk; gradients, which the next step of an update reads at once, never are."""
        return tuple(
            kind for kind in KEPT_ON_DISK if kind in self.what and place_of(self.to, kind) != HOST
        )

    @property
    def folder(self) -> str | None:
        """The folder on the disk; None where there is none, or where the run is to name it."""
        return next(iter(disk_folders(self.to)), None)

    def units_of(self, kind: str) -> tuple[str, ...]:
        """Return the patterns of the units of which a kind is offloaded; none where all units' is.

        A pattern is for all kinds, or for the one before its colon.
        """
        kinds_and_patterns = (pattern.rpartition(":") for pattern in self.units)
        return tuple(pattern for own, _, pattern in kinds_and_patterns if own in ("", kind))

    @property
    def page_optimizer_bytes(self) -> int | None:
        """The device memory for pages of the optimizer's states; None without pages."""
        return None if self.page_optimizer is None else parse_bytes(self.page_optimizer)

    @property
    def page_size_bytes(self) -> int:
        """The size of a page."""
        return parse_bytes(self.page_bytes)

    @property
    def host_cache_bytes(self) -> int:
        """The host memory that keeps a part of what would be on disk."""
        return 0 if self.host_cache is None else parse_bytes(self.host_cache)

    @property
    def memory_budget_bytes(self) -> int | None:
        """The device memory in which the program has to fit; None without a limit."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)
