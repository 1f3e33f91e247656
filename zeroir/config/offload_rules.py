"""The rules on options of what is kept outside device memory, beside other options."""

from __future__ import annotations

from collections.abc import Iterable

from zeroir.config.offload_places import (
    ADAPTIVE,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PAGE_BYTES,
    disk_folders,
    named_places,
)
from zeroir.config.optimizer import OptimizerOptions
from zeroir.config.options import CompileOptions
from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.optimizers.catalogue import WITH_STATES_OF_ELEMENTS, Algorithm


def offload_problem(options: CompileOptions) -> str | None:
    """Return a sentence on the first of these options that does not go with the others; None if all do."""
    kinds = options.offload.what
    if options.offload.host_cache is not None and not options.offload.is_to_disk:
        return f"--host-cache {options.offload.host_cache} needs --offload-to disk:FOLDER, whose cache it is"
    if ADAPTIVE in kinds:
        return _adaptive_problem(options)
    if not kinds and options.offload.to != HOST:
        return f"--offload-to {options.offload.to} needs --offload, which says what is kept there"
    named = named_places(options.offload.to)
    for kind in named:
        if kind not in kinds:
            return (
                f"--offload-to {options.offload.to} has a place for {kind}, but --offload has "
                f"{', '.join(kinds)}"
            )
    if named.get(GRADIENTS, HOST) != HOST:
        return (
            f"--offload-to {options.offload.to} names a disk for gradients, which the next op reads, so that host "
            "memory keeps them"
        )
    folders = disk_folders(options.offload.to)
    if len(folders) > 1:
        return (
            f"--offload-to {options.offload.to} names the folders {' and '.join(folders)}, but a rank has one file "
            "on disk; name one folder"
        )
    if options.offload.is_to_disk and not options.offload.kept_on_disk:
        return (
            f"--offload-to {options.offload.to} is for optimizer, parameters and activations, but --offload has "
            f"{', '.join(kinds)}, which host memory keeps"
        )
    if not kinds and options.offload.units:
        return (
            f"--offload-units {','.join(options.offload.units)} needs --offload, which says what is kept "
            "outside device memory"
        )
    for pattern in options.offload.units:
        kind, colon, _ = pattern.rpartition(":")
        if colon and kind not in kinds:
            return (
                f"--offload-units {pattern} is for {kind!r}, but --offload has {', '.join(kinds)}"
            )
    if options.offload.fraction is not None and OPTIMIZER not in kinds:
        return f"--offload-fraction {options.offload.fraction:g} needs --offload optimizer"
    if OPTIMIZER in kinds and not options.offload.units:
        for algorithm in dict.fromkeys(_algorithms(options)):
            if algorithm.direction_dtype is not None:
                return (
                    f"--offload optimizer updates shards on the host, but {algorithm} works on whole parameters, which "
                    "only devices gather; name units with another optimizer by --offload-units"
                )
    if options.offload.page_optimizer is not None and OPTIMIZER in kinds:
        return (
            f"{options.flag('page_optimizer')} updates on the device, and --offload optimizer on the host; "
            "leave one of them out"
        )
    return (
        _speculation_problem(options)
        or _page_problem(options)
        or bits_problem(options.optimizer, _algorithms(options))
    )


def _speculation_problem(options: CompileOptions) -> str | None:
    if not options.offload.speculate:
        return None
    if OPTIMIZER not in options.offload.what:
        return "--speculate is for an update on the host: it needs --offload optimizer"
    if not options.has_decision:
        return "--speculate needs --clip or --precision fp16: without them no decision holds the update back"
    if OPTIMIZER in options.offload.kept_on_disk:
        return f"--speculate updates states in host memory, but --offload-to {options.offload.to} keeps them on a disk"
    if options.optimizer.bits != 32:
        return f"--speculate is for states of 32 bits, but --optimizer-bits is {options.optimizer.bits}"
    return None


def _adaptive_problem(options: CompileOptions) -> str | None:
    if options.offload.memory_budget is None:
        return (
            f"--offload {ADAPTIVE} needs --memory-budget, which says how much stays on the device"
        )
    if named_places(options.offload.to):
        return (
            f"--offload {ADAPTIVE} chooses what is moved, so that --offload-to is one place for all of it, not "
            f"{options.offload.to}"
        )
    chosen = {
        "--speculate": options.offload.speculate,
        "--offload-units": options.offload.units,
        "--offload-fraction": options.offload.fraction,
        "--page-optimizer": options.offload.page_optimizer,
    }
    for flag, value in chosen.items():
        if value:
            return f"--offload {ADAPTIVE} chooses what {flag} says; leave one of them out"
    return _page_problem(options) or bits_problem(options.optimizer, _algorithms(options))


def _page_problem(options: CompileOptions) -> str | None:
    budget_bytes = options.offload.page_optimizer_bytes
    if budget_bytes is None:
        if options.offload.page_size_bytes != parse_bytes(PAGE_BYTES):
            return f"--page-bytes {options.offload.page_bytes} needs --page-optimizer"
        return None
    if budget_bytes < options.offload.page_size_bytes:
        return (
            f"--page-optimizer {options.offload.page_optimizer} is less than one page of --page-bytes "
            f"{options.offload.page_bytes}"
        )
    return None


def bits_problem(optimizer: OptimizerOptions, algorithms: Iterable[Algorithm]) -> str | None:
    """Return a sentence on the bits of an optimizer's states where they have no effect with any of these algorithms."""
    if optimizer.bits == 32:
        return None
    bits = optimizer.flag("optimizer_bits")
    if optimizer.algorithm.direction_dtype is not None:
        return (
            f"{bits} is for states of single elements ({', '.join(WITH_STATES_OF_ELEMENTS)}), but "
            f"{optimizer.algorithm} works on whole parameters"
        )
    if not any(algorithm.has_states_of_elements for algorithm in algorithms):
        return f"{bits} has no effect: {optimizer.algorithm} keeps no states"
    return None


def _algorithms(options: CompileOptions) -> tuple[Algorithm, ...]:
    """Return the optimizers of all parameters."""
    return tuple(each.algorithm for each in options.every_optimizer)
