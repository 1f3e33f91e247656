"""The segment calls of a step, which the frontend cuts from the joint graph and lowers to ops."""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.frontend.capture.captured_graph import OutputName
from zeroir.ir.segments.segment import Segment, TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSource:
    """The value of a segment input: a parameter by name, or a root value viewed from ``offset`` on as ``type``.

    ``offset`` is in elements.
    """

    type: TensorType
    parameter: str | None = None
    root: int = -1
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSink:
    """An output that later segments read: the root value of this number."""

    root: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSink:
    """An output that contributes to a parameter's gradient."""

    parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSink:
    """An output that is the new value of a module buffer."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSink:
    """The output that is the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSink:
    """An output that the engine reads, by its name."""

    name: OutputName


Sink = StoredSink | GradientSink | BufferSink | LossSink | OutputSink


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCall:
    """A segment with a source for each input and a sink for each output.

    ``unit`` and ``call_index`` identify the call of a unit to which it belongs. If it ``is_exchange``, the nodes of the
    segment are collectives, and the program has ops instead of the call.
    """

    segment: Segment
    unit: str
    call_index: int
    is_backward: bool
    sources: tuple[SegmentSource, ...]
    sinks: tuple[Sink, ...]
    is_exchange: bool = False
