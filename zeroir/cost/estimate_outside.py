"""The part of an estimate outside the device: host memory, the disk, copies, pages, and staging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zeroir.config.offload_places import (
    ACTIVATIONS,
    DISK_PIECE_NUMEL,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    place_of,
)
from zeroir.cost.estimate_options import (
    MOST_SLOTS,
    EstimateOptions,
    bytes_per_state,
    has_master,
    optimizer_bytes_per_parameter,
    paged_numbers,
)
from zeroir.ir.buffers import Space
from zeroir.ir.byte_sizes import parse_bytes

UNITS_HELD: Final = 2
"""Units with gathered parameters, and units with full gradients, at once: the defaults of the compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """Bytes that a rank copies in a step of one micro-step, by direction; ``load`` and ``store`` are of the disk."""

    to_host: int
    to_device: int
    load: int
    store: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Bytes of pages on one rank: those at rest in host memory, and those of the slots on the device."""

    host: float
    slots: int


def paged_at(stage: int, options: EstimateOptions) -> Paged:
    """Return the paged bytes at a stage: nothing if all states fit into the memory for pages.

    The part of this memory that the slots do not need has resident states. The others come in and go out once per step.
    """
    numbers = paged_numbers(options.optimizer)
    owned = options.params / (options.world_size if stage >= 1 else 1)
    states = numbers * bytes_per_state(options) * owned
    if options.offload.page_optimizer is None or states <= parse_bytes(
        options.offload.page_optimizer
    ):
        return Paged(host=0.0, slots=0)
    device, page = (
        parse_bytes(options.offload.page_optimizer),
        parse_bytes(options.offload.page_bytes),
    )
    slots = min(MOST_SLOTS, device // page) * page
    return Paged(host=states - (device - slots), slots=slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Bytes of one rank's staging on the device, in addition to whole units and pages, and in host memory."""

    device: float
    host: float


def staging_at(stage: int, options: EstimateOptions) -> Staging | None:
    """Return staging at a stage: that of two units, one in use and one in transfer; None if it is unknown.

    Gradients go down and 16-bit parameters go up through host memory where the host updates; with a disk, everything
    that an update needs passes through it in pieces.
    """
    kinds = set(options.offload.what) - {ACTIVATIONS}
    if not kinds:
        return Staging(device=0.0, host=0.0)
    if options.layers is None:
        return None
    item, ranks = options.itemsize_bytes, options.world_size
    owned = options.params / options.layers / (ranks if stage >= 1 else 1)
    held = min(UNITS_HELD, options.layers)
    device = host = 0.0
    if PARAMETERS in kinds and stage >= 3:
        device += held * item * owned
    if GRADIENTS in kinds and OPTIMIZER not in kinds:
        device += held * item * owned
    if OPTIMIZER in kinds:
        host += held * owned * (0 if GRADIENTS in kinds else item)
        host += held * owned * (item if has_master(options) else 0)
    piece = min(DISK_PIECE_NUMEL, owned)
    if OPTIMIZER in kinds and _is_on_disk(OPTIMIZER, options):
        host += held * piece * optimizer_bytes_per_parameter(options)
    # Without master weights the host updates the parameters in place, or a copy that belongs to the optimizer.
    owner = PARAMETERS if PARAMETERS in kinds else OPTIMIZER
    if owner in kinds and _is_on_disk(owner, options):
        host += held * piece * (item if owner == PARAMETERS or not has_master(options) else 0)
    return Staging(device=device, host=host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Bytes of one rank outside its device; ``states`` are those of the optimizer's states among them."""

    host: float
    disk: float
    states: float
    moved: MovedBytes


def outside_at(stage: int, options: EstimateOptions, saved_bytes: int) -> Outside:
    """Return the bytes kept outside the device at a stage, and copied for that.

    The gradients of the elements that the host updates go down, and their new parameters come up. Where the parameters
    are offloaded, they come up for the forward and the backward, and go down if the device updates or gathers them.
    """
    count, ranks, item = options.params, options.world_size, options.itemsize_bytes
    owned = count / (ranks if stage >= 1 else 1)
    held = count / (ranks if stage >= 3 else 1)
    gradients = down = up = states = updated = load = store = 0.0
    kept = {Space.HOST: 0.0, Space.DISK: 0.0}
    if OPTIMIZER in options.offload.what:
        updated = owned * (1.0 if options.offload.fraction is None else options.offload.fraction)
        states = optimizer_bytes_per_parameter(options) * updated
        # Without master weights the host updates a copy of the parameters.
        copied = (
            0.0 if has_master(options) or PARAMETERS in options.offload.what else item * updated
        )
        down += item * updated
        if _is_on_disk(OPTIMIZER, options):
            kept[Space.DISK] += states + copied
            load += states + copied
            store += states + copied
        else:
            kept[Space.HOST] += states + copied
        if PARAMETERS not in options.offload.what or stage in (1, 2):
            up += item * updated
    if GRADIENTS in options.offload.what:
        gradients = item * owned
        down += item * (owned - updated)
        up += item * (owned - updated)
    if PARAMETERS in options.offload.what:
        # Without master weights the device's update needs them once more.
        up += 2 * item * held + (0.0 if has_master(options) else item * (owned - updated))
        down += item * (held if stage in (1, 2) else held - updated)
        # So does the host's, and in stages 1 and 2 the new parameters are gathered from their home.
        again = (0 if has_master(options) else owned) + (updated if stage in (1, 2) else 0)
        if _is_on_disk(PARAMETERS, options):
            kept[Space.DISK] += item * held
            load += item * (2 * held + again)
            store += item * (held + (updated if stage in (1, 2) else 0))
        else:
            kept[Space.HOST] += item * held
    if ACTIVATIONS in options.offload.what:
        down += saved_bytes
        up += saved_bytes
        if _is_on_disk(ACTIVATIONS, options):
            kept[Space.DISK] += saved_bytes
            load += saved_bytes
            store += saved_bytes
        else:
            kept[Space.HOST] += saved_bytes
    return Outside(
        host=gradients + kept[Space.HOST],
        disk=kept[Space.DISK],
        states=states,
        moved=MovedBytes(
            to_host=round(down), to_device=round(up), load=round(load), store=round(store)
        ),
    )


def _is_on_disk(kind: str, options: EstimateOptions) -> bool:
    return place_of(options.offload.to, kind) != HOST
