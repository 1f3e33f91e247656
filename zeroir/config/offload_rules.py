"""The rules on options of what is kept outside device memory, beside other options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroir.config.offload_fields import (
    ADAPTIVE,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PAGE_BYTES,
    disk_folders,
    named_places,
)
from zeroir.ir.amounts import parse_bytes
from zeroir.ir.optimizers.catalogue import WITH_STATES_OF_ELEMENTS, Algorithm

if TYPE_CHECKING:
    from zeroir.config.options import CompileOptions


def offload_problem(options: CompileOptions) -> str | None:
    """A sentence on the first of these options that does not go with the others; None if all do."""
    kinds = options.offload
    if options.host_cache is not None and not options.is_offloaded_to_disk:
        return (
            f"--host-cache {options.host_cache} needs --offload-to disk:FOLDER, whose cache it is"
        )
    if ADAPTIVE in kinds:
        return _adaptive_problem(options)
    if not kinds and options.offload_to != HOST:
        return f"--offload-to {options.offload_to} needs --offload, which says what is kept there"
    named = named_places(options.offload_to)
    for kind in named:
        if kind not in kinds:
            return (
                f"--offload-to {options.offload_to} has a place for {kind}, but --offload has "
                f"{', '.join(kinds)}"
            )
    if named.get(GRADIENTS, HOST) != HOST:
        return (
            f"--offload-to {options.offload_to} names a disk for gradients, which the next op reads, so that host "
            "memory keeps them"
        )
    folders = disk_folders(options.offload_to)
    if len(folders) > 1:
        return (
            f"--offload-to {options.offload_to} names the folders {' and '.join(folders)}, but a rank has one file "
            "on disk; name one folder"
        )
    if options.is_offloaded_to_disk and not options.kept_on_disk:
        return (
            f"--offload-to {options.offload_to} is for optimizer, parameters and activations, but --offload has "
            f"{', '.join(kinds)}, which host memory keeps"
        )
    if not kinds and options.offload_units:
        return (
            f"--offload-units {','.join(options.offload_units)} needs --offload, which says what is kept "
            "outside device memory"
        )
    for pattern in options.offload_units:
        kind, colon, _ = pattern.rpartition(":")
        if colon and kind not in kinds:
            return (
                f"--offload-units {pattern} is for {kind!r}, but --offload has {', '.join(kinds)}"
            )
    if options.offload_fraction is not None and OPTIMIZER not in kinds:
        return f"--offload-fraction {options.offload_fraction:g} needs --offload optimizer"
    if OPTIMIZER in kinds and not options.offload_units:
        for algorithm in dict.fromkeys(_algorithms(options)):
            if algorithm.direction_dtype is not None:
                return (
                    f"--offload optimizer updates shards on the host, but {algorithm} works on whole parameters, which "
                    "only devices gather; name units with another optimizer by --offload-units"
                )
    if options.page_optimizer is not None and OPTIMIZER in kinds:
        return (
            f"--page-optimizer {options.page_optimizer} updates on the device, and --offload optimizer on the host; "
            "leave one of them out"
        )
    return _speculation_problem(options) or _page_problem(options) or _bits_problem(options)


def _speculation_problem(options: CompileOptions) -> str | None:
    if not options.speculate:
        return None
    if OPTIMIZER not in options.offload:
        return "--speculate is for an update on the host: it needs --offload optimizer"
    if not options.has_decision:
        return "--speculate needs --clip or --precision fp16: without them no decision holds the update back"
    if OPTIMIZER in options.kept_on_disk:
        return f"--speculate updates states in host memory, but --offload-to {options.offload_to} keeps them on a disk"
    if options.optimizer_bits != 32:
        return f"--speculate is for states of 32 bits, but --optimizer-bits is {options.optimizer_bits}"
    return None


def _adaptive_problem(options: CompileOptions) -> str | None:
    if options.memory_budget is None:
        return (
            f"--offload {ADAPTIVE} needs --memory-budget, which says how much stays on the device"
        )
    if named_places(options.offload_to):
        return (
            f"--offload {ADAPTIVE} chooses what is moved, so that --offload-to is one place for all of it, not "
            f"{options.offload_to}"
        )
    chosen = {
        "--speculate": options.speculate,
        "--offload-units": options.offload_units,
        "--offload-fraction": options.offload_fraction,
        "--page-optimizer": options.page_optimizer,
    }
    for flag, value in chosen.items():
        if value:
            return f"--offload {ADAPTIVE} chooses what {flag} says; leave one of them out"
    return _page_problem(options) or _bits_problem(options)


def _page_problem(options: CompileOptions) -> str | None:
    budget_bytes = options.page_optimizer_bytes
    if budget_bytes is None:
        if options.page_size_bytes != parse_bytes(PAGE_BYTES):
            return f"--page-bytes {options.page_bytes} needs --page-optimizer"
        return None
    if budget_bytes < options.page_size_bytes:
        return (
            f"--page-optimizer {options.page_optimizer} is less than one page of --page-bytes "
            f"{options.page_bytes}"
        )
    return None


def _bits_problem(options: CompileOptions) -> str | None:
    if options.optimizer_bits == 32:
        return None
    if options.optimizer.direction_dtype is not None:
        return (
            f"--optimizer-bits {options.optimizer_bits} is for states of single elements "
            f"({', '.join(WITH_STATES_OF_ELEMENTS)}), but {options.optimizer} works on whole parameters"
        )
    if not any(algorithm.has_states_of_elements for algorithm in _algorithms(options)):
        return f"--optimizer-bits {options.optimizer_bits} has no effect: {options.optimizer} keeps no states"
    return None


def _algorithms(options: CompileOptions) -> tuple[Algorithm, ...]:
    """The optimizers of all parameters."""
    return (options.optimizer, *(options.of_group(spec).optimizer for spec in options.groups))
