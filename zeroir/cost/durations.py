"""The time of each op on a machine when it does not wait.

A node of a segment takes as long as its arithmetic or its memory traffic, whichever is longer, plus the launch of its
kernel: the roofline model (Williams et al. 2009), node by node, as eager kernels run. An op that only moves or updates
elements takes as long as its memory traffic. Transfers, and ops that the host runs, share the node's host with the
other ranks (``wires``). Measurements of a profile replace computed times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from zeroir.cost.collectives import Ring, transfer
from zeroir.cost.machine import CollectiveKind, Machine
from zeroir.cost.rounded_states import (
    compiled_rounding_bytes,
    rounding_bytes,
    rounding_kernels,
)
from zeroir.cost.update_flops import update_flops
from zeroir.cost.wires import FlowCost, host_rates
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.traffic import payload_bytes
from zeroir.ir.buffers import Region
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Executor
from zeroir.ir.ops import Mode
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, Segment, TensorType
from zeroir.ir.segments.views import shares_storage

_PICKING: Final = frozenset(
    {
        "aten.embedding.default",
        "aten.gather.default",
        "aten.index.Tensor",
        "aten.index_select.default",
    }
)
"""Nodes that read at most as many bytes of an operand as they write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """The cost of one call of a segment: its seconds, and its floating-point operations by dtype."""

    seconds: float
    flops: Mapping[DType, int]
    is_measured: bool = False


def segment_cost(segment: Segment, machine: Machine) -> SegmentCost:
    """Return the cost of one call: the measured time, or else the computed time × the machine's ``segments_scale``."""
    types = segment.types()
    seconds = 0.0
    flops: dict[DType, int] = {}
    for node in segment.nodes:
        if shares_storage(node.op):
            continue
        dtype = _dtype(node, types)
        flops[dtype] = flops.get(dtype, 0) + node.flops
        arithmetic_s = node.flops / machine.compute.flops_per_s(dtype)
        traffic_s = node_bytes(node, types) / machine.memory.achieved_bytes_per_s
        seconds += max(arithmetic_s, traffic_s) + machine.compute.kernel_launch_s.value
    # The digest takes as long to compute as everything above, and only measurements need it.
    measured = machine.segments.get(segment.digest()) if machine.segments else None
    if machine.segments_scale is not None:
        seconds *= machine.segments_scale.value
    return SegmentCost(
        seconds=seconds if measured is None else measured.seconds,
        flops={dtype: count for dtype, count in flops.items() if count},
        is_measured=measured is not None,
    )


def node_bytes(node: Node, types: tuple[TensorType | None, ...]) -> int:
    """Return bytes that a node reads and writes: each operand once, and each result."""
    written = sum(result.size_bytes for result in node.results if result is not None)
    read = 0
    for index in dict.fromkeys(ref.index for ref in node.refs()):
        operand = types[index]
        if operand is not None:
            size = _distinct_bytes(operand)
            read += min(size, written) if node.op in _PICKING else size
    return read + written


def _distinct_bytes(tensor: TensorType) -> int:
    """Return bytes of the distinct elements of a tensor: an expanded dimension repeats one element."""
    sizes = (size for size, step in zip(tensor.shape, tensor.stride, strict=True) if step)
    return math.prod(sizes) * tensor.dtype.itemsize_bytes


def _dtype(node: Node, types: tuple[TensorType | None, ...]) -> DType:
    """Return the dtype in which a node computes: that of its first floating-point operand."""
    for ref in node.refs():
        operand = types[ref.index]
        if operand is not None and operand.dtype.is_floating:
            return operand.dtype
    return DType.F32


class Durations:
    """The times of a program's ops on a machine.

    The guesses of speculative steps are right, so that committing them takes no time, unless the step ``is_redone``.
    """

    def __init__(self, program: Program, machine: Machine, *, is_redone: bool = False) -> None:
        self._program = program
        self._is_redone = is_redone
        self._machine = machine
        self._segment_costs: dict[str, SegmentCost] = {}
        self._executors = {stream.name: stream.executor for stream in program.streams}
        self._collective_costs: dict[tuple[CollectiveKind, Ring, int], FlowCost] = {}
        self._measured_ops = {measured.key: measured for measured in machine.ops}
        self._host = host_rates(machine, program.mesh.world_size)

    def segment(self, name: str) -> SegmentCost:
        """Return the cost of one call of a segment."""
        cost = self._segment_costs.get(name)
        if cost is None:
            cost = segment_cost(self._program.segment_by_name[name], self._machine)
            self._segment_costs[name] = cost
        return cost

    @property
    def segment_costs(self) -> tuple[SegmentCost, ...]:
        """The costs that :meth:`segment` has computed, one for each segment."""
        return tuple(self._segment_costs.values())

    @property
    def collective_costs(self) -> tuple[FlowCost, ...]:
        """The costs that :meth:`collective` has computed, one for each kind, ring and size."""
        return tuple(self._collective_costs.values())

    def collective(self, op: ops.CollectiveOp, ring: Ring) -> FlowCost:
        """Return the cost of a collective among the ranks of a ring."""
        key = collective_kind(op), ring, payload_bytes(op, self._program)
        cost = self._collective_costs.get(key)
        if cost is None:
            cost = transfer(self._machine, *key)
            self._collective_costs[key] = cost
        return cost

    def flow(self, op: ops.Op) -> FlowCost | None:
        """Return the cost of a transfer, or of an op that the host runs; None for any other op."""
        match op:
            case ops.CommitStep() if not self._is_redone:
                return self._host.work(0, 0, 0)
            case ops.ToHost() | ops.ToDevice() | ops.Load() | ops.Store():
                return self._host.transfer(op, self._bytes(op.source), self._measured_s(op))
            case ops.Elementwise() | ops.Update() if self._is_of_host(op.stream):
                flops = update_flops(self._program, op)
                # States of 8 bits are widened and rounded in chunks that fit a cache.
                cached = compiled_rounding_bytes(self._program, op)
                traffic = self.traffic_bytes(op) - rounding_bytes(self._program, op)
                return self._host.work(traffic, cached, flops, self._measured_s(op))
            case _:
                return None

    def seconds(self, op: ops.Op) -> float:
        """Return the seconds of an op that is not a collective, alone.

        A wait takes no time itself, unless it was measured.
        """
        flow = self.flow(op)
        if flow is not None:
            return flow.seconds
        measured = self._measured_s(op)
        if measured is not None:
            return sum(measured) + self._products_s(op)
        match op:
            case ops.Alloc() | ops.Release() | ops.Wait():
                return 0.0
            case ops.Collective():
                raise ValueError("the time of a collective depends on its ranks")
            case ops.Compute():
                cost = self.segment(op.segment)
                # A measured time includes the addition of results.
                return cost.seconds + (0.0 if cost.is_measured else self._added_s(op))
            case ops.Elementwise() | ops.Update():
                launches = 1 + rounding_kernels(self._program, op)
                return self._kernel_s(self.traffic_bytes(op), launches) + self._products_s(op)
            case ops.ToHost() | ops.ToDevice() | ops.Load() | ops.Store():
                raise ValueError("a transfer is a flow")
            case _:
                assert_never(op)

    def _measured_s(self, op: ops.Op) -> tuple[float, float] | None:
        """Return the measured latency of an op in seconds, and the seconds of its bytes.

        None if it was not measured.
        """
        if isinstance(op, ops.Compute):
            return None
        measured = self._measured_ops.get((ops.op_name(type(op)), effects(op).stream))
        if measured is None:
            return None
        return measured.alpha_s, measured.beta_s_per_byte * self.traffic_bytes(op)

    def _is_of_host(self, stream: str) -> bool:
        return self._executors[stream] is not Executor.DEVICE

    def _added_s(self, op: ops.Compute) -> float:
        """Return the seconds to add results to their destinations: each kernel reads both and writes the sum."""
        added = [
            destination.view.region
            for destination in op.destinations
            if destination is not None and destination.mode is Mode.ACCUMULATE
        ]
        return sum(self._kernel_s(3 * self._bytes(region)) for region in added)

    def traffic_bytes(self, op: ops.Op) -> int:
        """Return the bytes that an op reads and writes, including scratch memory where it consists of many kernels."""
        effect = effects(op)
        once = sum(self._bytes(region) for region in (*effect.reads, *effect.writes))
        twice = sum(self._bytes(region) for region in effect.accumulates)
        return once + 2 * twice + rounding_bytes(self._program, op)

    def _products_s(self, op: ops.Op) -> float:
        """Return the seconds of the matrix products of an update."""
        flops = update_flops(self._program, op)
        if not flops or not isinstance(op, ops.OptimizerStep):
            return 0.0
        dtype = op.algorithm.direction_dtype or DType.F32
        return flops / self._machine.compute.flops_per_s(dtype)

    def _kernel_s(self, traffic_bytes: int, launches: int = 1) -> float:
        machine = self._machine
        launch_s = launches * machine.compute.kernel_launch_s.value
        return launch_s + traffic_bytes / machine.memory.achieved_bytes_per_s

    def _bytes(self, region: Region) -> int:
        buffer = self._program.buffer_by_name[region.buffer]
        return region.local_numel(self._program.mesh) * buffer.dtype.itemsize_bytes


def collective_kind(op: ops.CollectiveOp) -> CollectiveKind:
    """Return the kind of a collective, by which it is timed; a prefetch is an all-gather."""
    match op:
        case ops.Gather():
            return "all_gather"
        case ops.ReduceScatter():
            return "reduce_scatter"
        case ops.AllReduce():
            return "all_reduce"
        case ops.Broadcast():
            return "broadcast"
        case _:
            assert_never(op)
