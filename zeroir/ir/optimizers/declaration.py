"""The declaration of an optimizer for all packages; ``zeroir.runtime.optimizers`` has its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.elsewhere import InDeepSpeed, InTorch
from zeroir.ir.optimizers.settings import Setting, Value

Shape = tuple[int, ...]
Numbers = Mapping[str, float]
"""The hyper-parameters of a group by their names, as stored in programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementState:
    """An FP32 number that is kept for each element of a parameter, with torch's name."""

    name: str
    is_signed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """A tensor that is kept for a whole parameter, with torch's name where torch has the optimizer."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """FP32 numbers that are kept for whole parameters, other than one for each element.

    In a flat they have their own coordinates: ``parts`` are the tensors of a parameter of some shape, row-major, one
    after the other, parameter by parameter. If they are sharded, they are gathered for each step; otherwise each rank
    keeps and updates all of them. ``quantity`` is their name in programs. ``numbers`` is roughly how many are kept for
    each element of a square matrix, and ``description`` says which.
    """

    quantity: str
    parts: Callable[[Shape], tuple[StatePart, ...]]
    is_sharded: bool
    numbers: int
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScratch:
    """The scratch memory of the step of one parameter.

    ``own_bytes`` are those of its simultaneous tensors. ``product`` are the sides m, n and k of its largest product of
    an m × k and a k × n matrix, for which a library also needs memory.
    """

    own_bytes: int
    product: tuple[int, int, int] | None = None


def _no_flops(_shape: Shape, _hyper: Numbers) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """The step of an optimizer that works on whole parameters.

    It consists of two ops: ``direction`` computes an element's direction, of ``direction_dtype``, from its gradient and
    states, and ``optimizer_step`` reads the directions of the whole flat. With ``reads_parameters`` it also reads the
    whole parameters from before the step; this excludes a sharded state, because ops have one operand for both.

    ``scratch`` is for a parameter of some shape. ``flops`` are the floating-point operations of its step, in
    ``direction_dtype``, where they take time in addition to reading and writing the operands.
    """

    direction_dtype: DType
    scratch: Callable[[Shape], StepScratch]
    flops: Callable[[Shape, Numbers], int] = _no_flops
    own_state: OwnState | None = None
    reads_parameters: bool = False
    takes_matrices_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """An optimizer, whose update ``definition`` names where ``torch`` does not have it.

    ``settings`` are in the order of the elements of ``OptimizerStep.hyper``, ``states`` in that of its states. Without
    a ``whole`` step an update only uses an element and its states. ``torch`` and ``deepspeed`` are its names there;
    ``not_from_deepspeed`` says why DeepSpeed's optimizer of its name is another one. ``marks`` are the settings whose
    keys identify it, together with its states, in a checkpoint that does not name it; None if they do not.
    ``problem`` says why settings are inconsistent, in words that continue a sentence. ``most_numbers`` is the maximum
    of FP32 numbers that other implementations keep for each element, where they keep more.

    ``scratch_numbers`` are the FP32 numbers of scratch memory, for each element of a chunk, of an update without a
    whole step; torch's fused kernels need none. ``waits`` says why the host waits for the device in each step with
    these settings.
    """

    title: str
    definition: str = ""
    settings: tuple[Setting, ...]
    states: tuple[ElementState, ...] = ()
    whole: WholeStep | None = None
    torch: InTorch | None = None
    deepspeed: InDeepSpeed | None = None
    not_from_deepspeed: str | None = None
    marks: tuple[str, ...] | None = None
    problem: Callable[[Numbers], str | None] = lambda _: None
    waits: Callable[[Numbers], str | None] = lambda _: None
    scratch_numbers: int = 0
    most_numbers: int | None = None

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The elements of ``OptimizerStep.hyper``, in order."""
        return tuple(name for setting in self.settings for name in setting.hyper_names)

    def torch_settings(self, hyper: Sequence[float]) -> dict[str, Value]:
        """Return the elements of ``OptimizerStep.hyper`` as settings under the keys of torch's optimizers."""
        values: dict[str, Value] = {}
        several: dict[str, list[float]] = {}
        numbers = iter(hyper)
        for setting in self.settings:
            for key, index in setting.torch_places:
                value = setting.value(next(numbers))
                if index is None:
                    values[key] = value
                else:
                    several.setdefault(key, []).append(float(value))
                    values[key] = tuple(several[key])
        return values

    @property
    def own_state(self) -> OwnState | None:
        """The state of whole parameters, if there is any."""
        return None if self.whole is None else self.whole.own_state

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The fewest and the most FP32 numbers that implementations keep for each element."""
        own = 0 if self.own_state is None else self.own_state.numbers
        fewest = len(self.states) + own
        return fewest, fewest if self.most_numbers is None else self.most_numbers

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a step gathers for each element from stage 1 on, because it needs whole parameters."""
        if self.whole is None:
            return 0
        numbers = int(self.whole.reads_parameters)
        if self.whole.own_state is not None and self.whole.own_state.is_sharded:
            numbers += self.whole.own_state.numbers
        return self.whole.direction_dtype.itemsize_bytes + DType.F32.itemsize_bytes * numbers
