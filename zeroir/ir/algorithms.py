"""The optimizers: their states, their hyper-parameters, and what they read of whole parameters."""

from __future__ import annotations

from enum import StrEnum

from zeroir.ir.contents import FACTORS, PRECONDITIONERS
from zeroir.ir.dtypes import DType


class Algorithm(StrEnum):
    """Optimizers, each with torch's semantics of the same name.

    torch has no Lion (arXiv 2302.06675, algorithm 2) and no Shampoo (arXiv 1802.09568, algorithm 1).
    """

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    LION = "lion"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    SHAMPOO = "shampoo"

    @property
    def state_names(self) -> tuple[str, ...]:
        """The FP32 states kept per parameter, named as torch.optim names them."""
        return _STATE_NAMES[self]

    @property
    def direction_dtype(self) -> DType | None:
        """The dtype of the directions of an optimizer that works on whole parameters; None for the others.

        Its step is two ops: ``direction`` computes an element's direction from that element's gradient and states, and
        ``optimizer_step`` reads the directions of the whole flat.
        """
        return _DIRECTION_DTYPES.get(self)

    @property
    def has_states_of_elements(self) -> bool:
        """Whether its step needs nothing but an element and that element's states, of which it keeps some."""
        return bool(self.state_names) and self.direction_dtype is None

    @property
    def factors_name(self) -> str | None:
        """The FP32 state of whole parameters, in coordinates of its own (``zeroir/ir/factors.py``), if it keeps one."""
        return _FACTORS.get(self)

    @property
    def takes_matrices_alone(self) -> bool:
        """Whether it updates only parameters of two dimensions."""
        return self in (Algorithm.MUON, Algorithm.SHAMPOO)

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The elements of ``OptimizerStep.hyper``, in order."""
        return _HYPER_NAMES[self]


_STATE_NAMES = {
    Algorithm.SGD: (),
    Algorithm.MOMENTUM: ("momentum_buffer",),
    Algorithm.ADAM: ("exp_avg", "exp_avg_sq"),
    Algorithm.ADAMW: ("exp_avg", "exp_avg_sq"),
    Algorithm.LION: ("exp_avg",),
    Algorithm.MUON: ("momentum_buffer",),
    Algorithm.ADAFACTOR: (),
    Algorithm.SHAMPOO: (),
}

# Muon's iteration begins by rounding to BF16, so no more is gathered.
_DIRECTION_DTYPES = {
    Algorithm.MUON: DType.BF16,
    Algorithm.ADAFACTOR: DType.F32,
    Algorithm.SHAMPOO: DType.F32,
}

_FACTORS = {Algorithm.ADAFACTOR: FACTORS, Algorithm.SHAMPOO: PRECONDITIONERS}

_HYPER_NAMES = {
    Algorithm.SGD: ("momentum", "dampening", "nesterov", "weight_decay"),
    Algorithm.MOMENTUM: ("momentum", "dampening", "nesterov", "weight_decay"),
    Algorithm.ADAM: ("beta1", "beta2", "eps", "weight_decay"),
    Algorithm.ADAMW: ("beta1", "beta2", "eps", "weight_decay"),
    Algorithm.LION: ("beta1", "beta2", "weight_decay"),
    Algorithm.MUON: (
        "momentum",
        "nesterov",
        "weight_decay",
        "eps",
        "ns_steps",
        "ns_coefficients.0",
        "ns_coefficients.1",
        "ns_coefficients.2",
        "adjust_lr_fn",
    ),
    Algorithm.ADAFACTOR: ("beta2_decay", "eps", "eps2", "d", "weight_decay"),
    Algorithm.SHAMPOO: ("eps", "weight_decay"),
}
