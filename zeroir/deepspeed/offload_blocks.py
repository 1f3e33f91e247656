"""``offload_param`` and ``offload_optimizer``: their keys and treatments.

Source: ``deepspeed/runtime/zero/offload_config.py`` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from zeroir.deepspeed.json_types import BLOCK, Whole
from zeroir.deepspeed.treatment import honoured, meaningless

Device = Literal["none", "cpu", "nvme"]

_FOLDER = honoured("`offload_to` disk:FOLDER, where the device is nvme")
_PINNED = meaningless("host buffers are always pinned where there are GPUs")
_COUNT = meaningless(
    "two copies are under way, three where some take changes home; `zeroir show` states the bytes of staging"
)
_SIZE = meaningless(
    "a disk is read and written in pieces of at most 8 Mi elements; `zeroir show` states the bytes of staging"
)
_OVERLAPPED = meaningless("reads and writes of the disk always run beside the update")


class OffloadParamBlock(BaseModel):
    """``zero_optimization.offload_param``."""

    model_config = BLOCK

    device: Annotated[
        Device,
        honoured("`offload` parameters at stage 3; cpu: `offload_to` host, nvme: disk"),
    ] = "none"
    nvme_path: Annotated[str | None, Field(min_length=1), _FOLDER] = None
    buffer_count: Annotated[Whole, _COUNT] = 5
    buffer_size: Annotated[Whole, _SIZE] = 100_000_000
    max_in_cpu: Annotated[
        Whole,
        honoured("`host_cache`, in bytes, where the device is nvme; if absent, nothing is cached"),
    ] = 1_000_000_000
    pin_memory: Annotated[bool, _PINNED] = False


class OffloadOptimizerBlock(BaseModel):
    """``zero_optimization.offload_optimizer``."""

    model_config = BLOCK

    device: Annotated[
        Device,
        honoured("`offload` optimizer,gradients; cpu: `offload_to` host, nvme: disk"),
    ] = "none"
    nvme_path: Annotated[str | None, Field(min_length=1), _FOLDER] = None
    buffer_count: Annotated[Whole, _COUNT] = 4
    pin_memory: Annotated[bool, _PINNED] = False
    pipeline_read: Annotated[bool, _OVERLAPPED] = False
    pipeline_write: Annotated[bool, _OVERLAPPED] = False
    fast_init: Annotated[
        bool, meaningless("initial values are written straight to where they are kept")
    ] = False
    ratio: Annotated[
        float,
        Field(ge=0, le=1),
        honoured("`offload_fraction` at stage 3; with 0 the optimizer stays on the device"),
    ] = 1.0
    super_offload: Annotated[
        bool,
        meaningless(
            "the update runs beside the backward wherever no decision waits for all gradients"
        ),
    ] = False
    convert_grad_on_cpu: Annotated[
        bool, meaningless("gradients travel in their own dtype and are widened on the host")
    ] = True
    cpuadam_cores_perc: Annotated[
        float, Field(ge=0, le=1), meaningless("the update takes the cores that a rank has")
    ] = 0.8
