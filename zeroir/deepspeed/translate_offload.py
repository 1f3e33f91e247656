"""Translation of DeepSpeed's offloading keys to options.

Sources: ``docs/_pages/config-json.md``, ``deepspeed/runtime/zero/offload_config.py`` and ``runtime/engine.py`` of
DeepSpeed 0.19.6: the optimizer is offloaded at stages 1 to 3 together with its gradients, parameters at stage 3, and a
part of the optimizer at stage 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroir.deepspeed.model import DeepSpeedConfiguration, ZeroOptimization
from zeroir.errors import UserError

_BLOCK = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTranslation:
    """Options with their values and the keys that they come from, and notes on keys without effect."""

    options: Mapping[str, tuple[object, str]]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestedBlock:
    """A request of one block: the value of ``offload_to``, and the key that it comes from."""

    place: str
    key: str


def translate_offload(
    configuration: DeepSpeedConfiguration, zero: ZeroOptimization, stage: int
) -> OffloadTranslation:
    """Return the offloading options at a stage.

    Raises:
        UserError: if the blocks name different folders, since a rank has one file.
    """
    notes: list[str] = []
    asked: dict[tuple[str, ...], _RequestedBlock] = {}
    ratio_key = f"{_BLOCK}.offload_optimizer.ratio"
    block = zero.offload_optimizer
    ratio = 1.0 if block is None else block.ratio
    if ratio < 1 and stage < 3:
        notes.append(f"{ratio_key}: no meaning at stage {stage}, as in DeepSpeed.")
        ratio = 1.0
    optimizer = _request(
        "offload_optimizer",
        "none" if block is None else block.device,
        None if block is None else block.nvme_path,
        old="cpu_offload" if zero.cpu_offload else None,
        notes=notes,
    )
    if optimizer is not None and stage == 0:
        notes.append(f"{optimizer.key}: no meaning at stage 0, as in DeepSpeed.")
    elif optimizer is not None and ratio == 0:
        notes.append(f"{optimizer.key}: no meaning with a ratio of 0.")
    elif optimizer is not None:
        asked["optimizer", "gradients"] = optimizer
    param = zero.offload_param
    parameters = _request(
        "offload_param",
        "none" if param is None else param.device,
        None if param is None else param.nvme_path,
        old="cpu_offload_param" if zero.cpu_offload_param else None,
        notes=notes,
    )
    if parameters is not None and stage < 3:
        notes.append(f"{parameters.key}: no meaning at stage {stage}, as in DeepSpeed.")
    elif parameters is not None:
        asked["parameters",] = parameters
    if configuration.activation_checkpointing.cpu_checkpointing:
        key = "activation_checkpointing.cpu_checkpointing"
        asked["activations",] = _RequestedBlock(place="host", key=key)
    if not asked:
        return OffloadTranslation(options={}, notes=tuple(notes))
    kinds = tuple(kind for group in asked for kind in group)
    options: dict[str, tuple[object, str]] = {
        "offload": (",".join(kinds), next(iter(asked.values())).key),
    }
    on_disk = _on_disk(tuple(asked.values()))
    if on_disk is not None:
        # Gradients are in host memory wherever the optimizer is.
        places = {
            kind: request.place
            for group, request in asked.items()
            for kind in group
            if kind != "gradients"
        }
        pairs = ",".join(f"{kind}={place}" for kind, place in places.items())
        is_same = len(set(places.values())) == 1
        options["offload_to"] = (on_disk.place if is_same else pairs, on_disk.key)
    if 0 < ratio < 1 and "optimizer" in kinds:
        options["offload_fraction"] = (ratio, ratio_key)
    return OffloadTranslation(options=options, notes=tuple(notes))


def _request(
    block: str, device: str, nvme_path: str | None, *, old: str | None, notes: list[str]
) -> _RequestedBlock | None:
    """Return the request of a block, or of the key ``old`` of earlier DeepSpeed versions; None if there is neither."""
    if nvme_path is not None and device != "nvme":
        notes.append(f"{_BLOCK}.{block}.nvme_path: no meaning with the device {device}.")
    if device == "none":
        return None if old is None else _RequestedBlock(place="host", key=f"{_BLOCK}.{old}")
    folder = "" if nvme_path is None else f":{nvme_path}"
    return _RequestedBlock(
        place="host" if device == "cpu" else f"disk{folder}", key=f"{_BLOCK}.{block}.device"
    )


def _on_disk(asked: tuple[_RequestedBlock, ...]) -> _RequestedBlock | None:
    """Return the first request for a disk; None without any."""
    requests = [request for request in asked if request.place != "host"]
    for request in requests:
        if request.place != requests[0].place:
            raise UserError(
                f"{requests[0].key} asks for {requests[0].place}, and {request.key} for {request.place}, but a rank "
                "has one file on disk: make the folders equal."
            )
    return next(iter(requests), None)
