"""The description of a machine in a TOML file: every figure with its source.

Rates and sizes of compute, memory and links are those of one accelerator, which is one rank; the rate of a link between
accelerators is that of one direction. Those of the host and its disk are those of a node, whose ranks share them. A
figure without a published source is marked as an assumption. The file also has the measurements of a profile, which
replace computed times: the seconds of a segment by its digest, and the latency and the time per byte of a collective by
its kind, its ranks and their nodes, and of any other op by its name and stream.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from zeroir.errors import UserError
from zeroir.ir.dtypes import DType

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


Measurement = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(_Table):
    """A number and its source; the name of the key ends in its unit."""

    value: Annotated[float, Field(strict=True)]
    source: Text


def _require(is_met: Callable[[float], bool], expected: str) -> AfterValidator:
    def check(figure: Figure) -> Figure:
        if not is_met(figure.value):
            raise PydanticCustomError("figure", "{expected}", {"expected": expected})
        return figure

    return AfterValidator(check)


_MACHINES: Final = resources.files("zeroir.cost") / "machines"
_EARLIER_KEYS: Final = frozenset(
    {"host_link.bytes_per_s", "host_link.fraction", "host.bytes_per_s"}
)
"""Keys of machine files from before they described the host of a node."""

_LONGEST_FILE: Final = 10_000_000
"""The most characters of a machine file: one with a profile has a line for every segment."""

# NaN fails every comparison.
Positive = Annotated[Figure, _require(lambda value: value > 0, "a value above 0")]
Size = Annotated[Figure, _require(lambda value: 0 < value < math.inf, "a finite value above 0")]
NotNegative = Annotated[
    Figure, _require(lambda value: 0 <= value < math.inf, "a finite value of at least 0")
]
Fraction = Annotated[
    Figure, _require(lambda value: 0 < value <= 1, "a value above 0, and at most 1")
]
Count = Annotated[
    Figure,
    _require(lambda value: value >= 1 and value.is_integer(), "a whole value of at least 1"),
]


class Arithmetic(_Table):
    """The arithmetic of an accelerator. ``fraction`` is the achieved fraction of the dense peak in matrix products."""

    fraction: Fraction
    kernel_launch_s: NotNegative
    dense_flops_per_s: Mapping[DType, Positive]

    @field_validator("dense_flops_per_s")
    @classmethod
    def _has_f32(cls, value: Mapping[DType, Figure]) -> Mapping[DType, Figure]:
        if DType.F32 not in value:
            raise PydanticCustomError("figure", "a table with f32, which stands for what is absent")
        return value

    def peak_flops_per_s(self, dtype: DType) -> float:
        """Return the dense peak FLOP/s of products of this dtype; of f32 where the machine has no figure."""
        return self.dense_flops_per_s.get(dtype, self.dense_flops_per_s[DType.F32]).value

    def flops_per_s(self, dtype: DType) -> float:
        """Return the achieved FLOP/s of products of this dtype."""
        return self.peak_flops_per_s(dtype) * self.fraction.value


class MemoryFigures(_Table):
    """The memory of an accelerator or of a node's host. ``fraction`` is the achieved fraction of its bandwidth."""

    size_bytes: Size
    bytes_per_s: Positive
    fraction: Fraction

    @property
    def achieved_bytes_per_s(self) -> float:
        """Bytes read or written per second."""
        return self.bytes_per_s.value * self.fraction.value


class Link(_Table):
    """A link of one accelerator, in one direction. ``fraction`` is the achieved fraction of its bandwidth.

    Bytes of a link ``through_host`` also cross the link to the host, once in each direction, and are written to the
    host's memory and read there.
    """

    name: str
    bytes_per_s: Positive
    fraction: Fraction
    latency_s: NotNegative
    through_host: bool = False

    @property
    def achieved_bytes_per_s(self) -> float:
        """Bytes sent per second."""
        return self.bytes_per_s.value * self.fraction.value


class HostLink(_Table):
    """The link between accelerators and their host, for ``to_device`` and ``to_host``.

    The rates are those that large copies of pinned memory achieve, as all of zeroir's host buffers are pinned.
    ``both_bytes_per_s`` bounds the sum of both directions. So many ``accelerators`` share one link.
    """

    name: Text
    accelerators: Count
    to_device_bytes_per_s: Positive
    to_host_bytes_per_s: Positive
    both_bytes_per_s: Positive
    latency_s: NotNegative


class Host(_Table):
    """The host of a node, which issues all ops and runs those of its own streams.

    A core reads and writes ``core_bytes_per_s`` in an update, as far as ``memory`` allows, and achieves
    ``core_flops_per_s`` for products. Issuing an op takes ``issue_s`` seconds. Where ``computes`` is true, the thread
    that issues ops also runs those of the stream ``compute``, as on a CPU, and issues nothing meanwhile: an accelerator
    is then a part of the host.
    """

    memory: MemoryFigures
    cores: Count
    core_bytes_per_s: Positive
    core_flops_per_s: Positive
    issue_s: NotNegative
    computes: bool = False


class Disk(_Table):
    """The disks of a node, for ``load`` and ``store``. ``both_bytes_per_s`` bounds reads and writes at once."""

    size_bytes: Size
    read_bytes_per_s: Positive
    write_bytes_per_s: Positive
    both_bytes_per_s: Positive
    latency_s: NotNegative


class MeasuredSegment(_Table):
    """Measurements of one call of a segment: its seconds, and its peak workspace outside its buffers in bytes."""

    seconds: Measurement
    workspace_bytes: Annotated[int, Field(ge=0)] | None = None
    source: Text


class MeasuredCollective(_Table):
    """The time of a collective of ``ranks`` ranks on ``nodes`` nodes: alpha + beta × the bytes of its full buffer."""

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)]
    alpha_s: Measurement
    beta_s_per_byte: Measurement
    source: Text

    @property
    def key(self) -> tuple[CollectiveKind, int, int]:
        """The collectives that the measurement applies to."""
        return self.kind, self.ranks, self.nodes


class MeasuredOp(_Table):
    """The time of the ops of a name on a stream: alpha + beta × the bytes that an op reads and writes."""

    name: Text
    stream: Text
    alpha_s: Measurement
    beta_s_per_byte: Measurement
    source: Text

    @property
    def key(self) -> tuple[str, str]:
        """The ops that the measurement applies to."""
        return self.name, self.stream


class Machine(_Table):
    """A machine, as the module's docstring describes. A machine without ``network`` is a single node.

    ``device_names`` are the names of the accelerator in CUDA. ``segments_scale`` is the factor by which the computed
    time of a segment without a measurement is multiplied. It makes segments with and without a measurement comparable.
    """

    name: Text
    accelerator: Text
    device_names: tuple[Text, ...] = ()
    accelerators_per_node: Count
    compute: Arithmetic
    memory: MemoryFigures
    node_link: Link
    network: Link | None = None
    host_link: HostLink
    host: Host
    disk: Disk
    segments_scale: Positive | None = None
    segments: Mapping[str, MeasuredSegment] = {}
    collectives: tuple[MeasuredCollective, ...] = ()
    ops: tuple[MeasuredOp, ...] = ()

    @property
    def node_ranks(self) -> int:
        """Ranks of one node."""
        return int(self.accelerators_per_node.value)

    def sharing_ranks(self, world_size: int) -> int:
        """Return the ranks that share a full node's host; where the host computes, as many as it has room for."""
        return self.node_ranks if self.host.computes else min(world_size, self.node_ranks)

    @property
    def has_workspaces(self) -> bool:
        """Whether a profile has measured the workspace of segments."""
        return any(segment.workspace_bytes is not None for segment in self.segments.values())


def machine_names() -> tuple[str, ...]:
    """Return the machines that zeroir describes."""
    names = (file.name for file in _MACHINES.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def machine_of_device(device_name: str) -> Machine | None:
    """Return a machine of zeroir whose accelerators have this name; None if there is none."""
    machines = (load_machine(name) for name in machine_names())
    return next((machine for machine in machines if device_name in machine.device_names), None)


def load_machine(name: str | Path) -> Machine:
    """Load a machine by the name of its description in zeroir, or by the path of a TOML file.

    Raises:
        UserError: if there is no such machine, or the file does not describe one; the message names the file, the
            key, and the expected value.
    """
    names = machine_names()
    if isinstance(name, str) and name in names:
        file = _MACHINES / f"{name}.toml"
        return parse_machine(file.read_text(encoding="utf-8"), f"{name}.toml")
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        raise UserError(
            f"There is no machine '{name}': choose {', '.join(names)}, or name a TOML file."
        )
    try:
        with path.open(encoding="utf-8") as opened:
            text = opened.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"The machine file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"The machine file {path} is no text: name a TOML file.") from None
    if len(text) > _LONGEST_FILE:
        raise UserError(
            f"The machine file {path} is far too long: name a TOML file that describes a machine."
        )
    return parse_machine(text, str(path))


def parse_machine(text: str, name: str) -> Machine:
    """Parse the TOML text of a machine; ``name`` is the name of the text in errors."""
    try:
        return Machine.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The machine file {name} is no TOML: {error}.") from None
    except RecursionError:
        raise UserError(f"The machine file {name} nests deeper than any machine does.") from None
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelt key is also missing, and its own message says more.
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        raise UserError(_explained(name, [*unknown, *problems][0])) from None


def _explained(name: str, first: ErrorDetails) -> str:
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    expected = first["msg"].removeprefix("Input should be ")
    match first["type"]:
        case "extra_forbidden" if key in _EARLIER_KEYS:
            return (
                f"The machine file {name} was written for an earlier version of zeroir, which had '{key}': describe "
                "its host_link, host and disk as in `dgx-h100`, or profile the machine again."
            )
        case "missing":
            return f"The machine file {name} has no '{key}': add it, as in `dgx-h100`."
        case "extra_forbidden":
            return f"The machine file {name} has an unknown key '{key}': remove it."
        case "model_type":
            return (
                f"In the machine file {name}, '{key}' is {first['input']!r}, but should be a table; a figure is "
                'written { value = 1.0, source = "where it comes from" }.'
            )
        case "figure" if isinstance(first["input"], dict):
            given = first["input"].get("value")
            return f"In the machine file {name}, '{key}' is {given}, but should be {expected}."
        case _:
            return f"In the machine file {name}, '{key}' is {first['input']!r}, but should be {expected}."


def to_toml(machine: Machine) -> str:
    """Return the machine as a TOML text, which ``parse_machine`` parses."""
    plain = machine.model_dump(mode="json", exclude_none=True)
    lines: list[str] = []
    _write_table(lines, "", plain)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(lines: list[str], path: str, table: Mapping[str, object]) -> None:
    later: list[tuple[str, Mapping[str, object], bool]] = []
    for key, value in table.items():
        match value:
            case dict() if "value" not in value:
                later.append((f"{path}{_key(key)}", value, False))
            case [str(), *_]:
                lines.append(f"{_key(key)} = {_literal(value)}")
            case list():
                later += [(f"{path}{_key(key)}", item, True) for item in value]
            case _:
                lines.append(f"{_key(key)} = {_literal(value)}")
    for name, inner, is_item in later:
        if is_item or any(not isinstance(v, dict) or "value" in v for v in inner.values()):
            lines.extend(("", f"[[{name}]]" if is_item else f"[{name}]"))
        _write_table(lines, f"{name}.", inner)


def _key(key: str) -> str:
    is_bare = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
    return key if is_bare else _literal(key)


def _literal(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "{ " + ", ".join(f"{_key(k)} = {_literal(v)}" for k, v in value.items()) + " }"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'
        case _:
            return repr(value)
