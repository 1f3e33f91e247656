"""The keywords of the public functions, as types for editors and type checkers.

Their names are the fields of ``CompileOptions`` and ``EstimateOptions``, which validate the values and describe them. A
keyword accepts more than the field where a plain string or a list will do, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypedDict

from zeroir.config import Precision
from zeroir.config.option_fields import AdjustLr
from zeroir.cost.estimate_options import Optimizer
from zeroir.ir.optimizers.catalogue import Algorithm, OptimizerName


class TorchOptimizer(Protocol):
    """An optimizer of ``torch.optim``."""

    param_groups: list[dict[str, object]]

    def step(self) -> object:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


class CompileKeywords(TypedDict, total=False):
    """The fields of ``CompileOptions``; each has a default."""

    stage: int
    mesh: str | None
    world_size: int
    precision: Precision
    micro_steps: int
    accumulate_locally: bool
    order: str
    units: str | None
    keep_fp32: str | Sequence[str]
    evaluate: bool
    outputs: str | Sequence[str]
    optimizer: (
        Algorithm | OptimizerName | type[TorchOptimizer] | TorchOptimizer | Sequence[TorchOptimizer]
    )
    lr: float
    schedule: str | None
    momentum: float | None
    dampening: float
    nesterov: bool | None
    beta1: float
    beta2: float | None
    eps: float | None
    weight_decay: float | None
    ns_steps: int | None
    ns_coefficients: tuple[float, float, float] | None
    adjust_lr_fn: AdjustLr | None
    beta2_decay: float | None
    eps2: float | None
    d: float | None
    group: str | Sequence[str] | Mapping[str, Mapping[str, object]]
    no_decay: bool
    clip: float | None
    ema: float | None
    prefetch: int
    prefetch_bytes: int | None
    prefetch_budget: str | None
    unshard: str | Sequence[str]
    unshard_bytes: int | None
    recompute: str | Sequence[str]
    live_gradients: int
    select_saved: bool
    bucket: int
    bucket_gathers: int | None
    overlap_update: bool
    offload: str | Sequence[str]
    offload_to: str | Mapping[str, str]
    host_cache: str | None
    offload_units: str | Sequence[str]
    offload_fraction: float | None
    speculate: bool | None
    page_optimizer: str | None
    page_bytes: str | int
    optimizer_bits: Literal[32, 8]
    memory_budget: str | None
    elide: bool
    loss_scale: float | None
    initial_loss_scale: float
    loss_scale_window: int
    loss_scale_factor: float
    loss_scale_hysteresis: int
    loss_scale_consecutive_hysteresis: bool
    minimum_loss_scale: float


class OffloadKeywords(TypedDict, total=False):
    """The fields of ``CompileOptions`` by which a compiled program is lowered again."""

    offload: str | Sequence[str]
    offload_to: str | Mapping[str, str]
    host_cache: str | None
    offload_units: str | Sequence[str]
    offload_fraction: float | None
    page_optimizer: str | None
    page_bytes: str | int


def is_torchs(optimizer: object) -> bool:
    """Whether an optimizer is given as torch's class or instance instead of as a name; no torch is imported."""
    return not (optimizer is None or isinstance(optimizer, str))


class EstimateKeywords(TypedDict, total=False):
    """The fields of ``EstimateOptions`` but for ``params``; each has a default."""

    world_size: int
    optimizer: Optimizer
    precision: Precision
    master: bool
    ema: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    seq: int | None
    batch: int
    vocab: int | None
    recompute: bool
    flash: bool
    offload: str | tuple[str, ...]
    offload_to: str | Mapping[str, str]
    offload_fraction: float | None
    page_optimizer: str | None
    page_bytes: str | int
    optimizer_bits: Literal[32, 8]
