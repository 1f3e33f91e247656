"""What an optimizer declares of itself, once, for every package; ``zeroir.runtime.optimizers`` has its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.elsewhere import InDeepSpeed, InTorch
from zeroir.ir.optimizers.settings import Setting, Value

Shape = tuple[int, ...]
Numbers = Mapping[str, float]
"""The hyper-parameters of a group by their names, as programs hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementState:
    """An FP32 number that is kept of each element of a parameter, under torch's name."""

    name: str
    is_signed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """A tensor that is kept of a whole parameter, under torch's name where torch has the optimizer."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """FP32 numbers that are kept of whole parameters, and are not one for each element.

    So a flat has them in coordinates of their own: ``parts`` are the tensors of a parameter of some shape, row by row,
    one after the other, and so for one parameter after the other. They are cut for the ranks if they are sharded, and
    gathered for each step; else each rank keeps and moves all of them. ``quantity`` is their name in programs.
    ``numbers`` says how many are kept for each element of a square matrix, in round numbers, and ``description`` which.
    """

    quantity: str
    parts: Callable[[Shape], tuple[StatePart, ...]]
    is_sharded: bool
    numbers: int
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScratch:
    """What the step of one parameter takes beside its operands.

    ``own_bytes`` are those of the tensors that it has at once. ``product`` are the sides m, n and k of its largest
    product of an m × k and a k × n matrix, for which a library takes memory, too.
    """

    own_bytes: int
    product: tuple[int, int, int] | None = None


def _no_flops(_shape: Shape, _hyper: Numbers) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """The step of an optimizer that works on whole parameters.

    It is two ops: ``direction`` computes an element's direction, of ``direction_dtype``, from its gradient and states,
    and ``optimizer_step`` reads the directions of the whole flat. With ``reads_parameters`` it also reads the whole
    parameters as they were; not together with a sharded state, since ops have one operand for both.

    ``scratch`` is for a parameter of some shape. ``flops`` are the floating-point operations of its step, in
    ``direction_dtype``, where they take time beside reading and writing the operands.
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
    a ``whole`` step nothing is needed but an element and its states. ``torch`` and ``deepspeed`` say what it is called
    there; ``not_from_deepspeed`` why DeepSpeed's optimizer of its name is another one. ``marks`` are the settings by
    whose keys it is known, together with its states, in a checkpoint that does not name it; None where it is not.
    ``problem`` says why settings do not fit each other, in words that continue a sentence. ``most_numbers`` are the
    FP32 numbers that other implementations keep for each element at most, where they keep more.

    ``scratch_numbers`` are the FP32 numbers that an update without a whole step has beside each element of a chunk;
    torch's fused kernels have none. ``waits`` says why the host waits for the device in each step with these settings.
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
        """The elements of ``OptimizerStep.hyper`` as settings under the keys of torch's optimizers."""
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
        """What is kept of whole parameters, if anything."""
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
