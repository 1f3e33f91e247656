"""The manifest of a checkpoint: its contents, the place of each element, and the checksum of every part.

A checkpoint is a folder with one safetensors file for each rank that has something to write, and ``manifest.json``.
Tensors in a file are one-dimensional. Each holds consecutive elements of a *flat*, the concatenation of the parameters
of a unit (see ``zeroir/ir/contents.py``), or one tensor of the model or of a rank's state. Every element of a flat is
in exactly one tensor, for any ZeRO stage.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from zeroir.checkpoint.checksums import PREFIX
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "zeroir-checkpoint"
VERSION: Final = (1, 0)
"""(major, minor). A minor version adds fields with defaults; readers refuse other major versions."""

MASTER: Final = "master"
"""The quantity with the trained parameters: FP32 masters if there are any, otherwise the parameters."""


def _as_number(value: object) -> object:
    """Convert a string such as ``"NaN"`` to the number that it stands for, since JSON has only finite ones."""
    return float(value) if value in ("Infinity", "-Infinity", "NaN") else value


def _known_dtype(name: str) -> str:
    if name not in ITEMSIZE_BYTES:
        raise ValueError(f"there is no dtype {name}")
    return name


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Field(ge=1, lt=1 << 63)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""The seeds that ``torch.manual_seed`` accepts."""
Number = Annotated[float, BeforeValidator(_as_number)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Dtype = Annotated[str, AfterValidator(_known_dtype)]
QuantityName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
"""An identifier, since exports use it in file names."""
ChecksumText = Annotated[str, Field(pattern=f"^{PREFIX}[0-9a-f]{{32}}$")]
PlainSetting = bool | int | FiniteNumber | str | None
Setting = PlainSetting | tuple[PlainSetting, ...]
"""The value of an optimizer group's setting: a number, a string, None, or a tuple of them."""


class Record(BaseModel):
    """A part of a manifest. Each field declares which values it may have, and readers refuse any other."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")


class StoredTensor(Record):
    """A tensor of a file: ``dtype`` as in the IR (``f32``, ``bf16``, ``i64``, …), and the checksum of its bytes."""

    name: str
    dtype: Dtype
    numel: Positive
    checksum: ChecksumText


class StoredFile(Record):
    """A safetensors file: its checksum, that of its header (the first 8 bytes and the JSON), and its tensors in order.

    Checksums are ``xxh3_128:`` and 32 hexadecimal digits.
    """

    name: str
    size_bytes: Count
    checksum: ChecksumText
    header_checksum: ChecksumText
    tensors: tuple[StoredTensor, ...]


class Piece(Record):
    """Elements ``[start, stop)`` of something, and the tensor that holds them."""

    file: str
    tensor: str
    start: Count
    stop: Count


class StoredParameter(Record):
    """A parameter's place in a flat: elements ``[offset, offset + numel)``, in row-major order."""

    name: str
    offset: Count
    shape: tuple[Count, ...]
    aliases: tuple[str, ...] = ()


class StoredQuantity(Record):
    """A quantity of a flat: ``master``, ``ema``, or an optimizer state such as ``exp_avg``.

    States of whole parameters have their own coordinates; see ``zeroir/ir/own_coordinates.py``. An 8-bit state is two
    quantities: for example ``exp_avg_codes``, one byte for each element, and ``exp_avg_absmax``, one FP32 scale for
    each block of 256; see ``zeroir/ir/eight_bit_states.py``.
    """

    name: QuantityName
    dtype: Dtype
    pieces: tuple[Piece, ...]


class StoredFlat(Record):
    """A flat with its parameters in order, and its quantities.

    Elements outside the parameters are padding, and zero.
    """

    name: str
    dtype: Dtype
    is_trainable: bool
    parameters: tuple[StoredParameter, ...]
    quantities: tuple[StoredQuantity, ...]


class StoredBuffer(Record):
    """A buffer of the model on the ranks where it has exactly these bits.

    ``aliases`` are the other names of the same tensor. ``is_persistent`` tells whether the ``state_dict`` of the model
    contains it.
    """

    name: str
    dtype: Dtype
    shape: tuple[Count, ...]
    ranks: tuple[Count, ...]
    file: str
    tensor: str
    aliases: tuple[str, ...] = ()
    is_persistent: bool = True


class StoredScalar(Record):
    """Numbers that the program keeps between steps, such as the loss scale; they are equal on all ranks."""

    name: str
    dtype: Dtype
    values: Annotated[tuple[Number, ...], Field(min_length=1)]


class StoredGroup(Record):
    """The settings of an optimizer group, as its ``param_groups`` entry had them, and the names of its parameters."""

    name: str
    algorithm: str
    settings: dict[str, Setting]
    parameters: tuple[str, ...] = ()


class RankState(Record):
    """State of one rank outside the program: random number generators, and the position in its data.

    ``state`` is a JSON tree in which tensors and bytes are references; see ``zeroir/checkpoint/state_tree.py``.
    """

    rank: Count
    state: JsonValue
    file: str | None = None


class OpenStep(Record):
    """The incomplete step in which the checkpoint was saved: its micro-steps so far, and the sums of each rank."""

    micro_steps: Positive
    pieces: tuple[StoredBuffer, ...]


class Origin(Record):
    """The program and job that saved the checkpoint."""

    zeroir: str
    torch: str | None = None
    program_digest: str | None = None
    fingerprint: str | None = None
    world_size: Positive
    mesh: tuple[tuple[str, Positive], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    saved_at: str
    """The time in UTC, in ISO 8601."""


class Manifest(Record):
    """The content of a manifest. ``step`` counts the training steps done, including skipped ones.

    ``metrics`` are numbers of the user that determine the best checkpoint. ``shared`` is the state that all ranks
    share, such as that of a learning-rate schedule. ``config`` is the configuration of a model for exports, if known
    (Hugging Face's ``config.to_dict()``), and ``config_owner`` the name of the module that has it: empty for the whole
    model.
    """

    format: Literal["zeroir-checkpoint"] = FORMAT
    version: tuple[int, int] = VERSION
    step: Count
    seed: Seed | None = None
    origin: Origin
    metrics: dict[str, Number] = {}
    files: tuple[StoredFile, ...] = ()
    flats: tuple[StoredFlat, ...] = ()
    buffers: tuple[StoredBuffer, ...] = ()
    scalars: tuple[StoredScalar, ...] = ()
    groups: tuple[StoredGroup, ...] = ()
    shared: JsonValue = None
    ranks: tuple[RankState, ...] = ()
    open_step: OpenStep | None = None
    config: JsonValue = None
    config_owner: str = ""
