"""The dumps of PyTorch's Flight Recorder on all ranks, in their state after a step was issued.

``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` compares dumps across ranks, so it checks the order of
collectives independently of zeroir. The dumps of a job that hangs can be compared with these. The format is version
2.10 of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, which torch 2.13 writes and reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from zeroir.cost.tasks import step_sections
from zeroir.ir import ops
from zeroir.ir.analysis.labels import labels
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.report.plain_pickle import Plain

FORMAT_VERSION: Final = "2.10"
DEFAULT_TIMEOUT_MS: Final = 600_000
"""Torch's default timeout: ten minutes."""

_SCALAR_TYPES: Final = {
    DType.F64: "Double",
    DType.F32: "Float",
    DType.F16: "Half",
    DType.BF16: "BFloat16",
    DType.F8_E4M3: "Byte",
    DType.I64: "Long",
    DType.I32: "Int",
    DType.I16: "Short",
    DType.I8: "Char",
    DType.U8: "Byte",
    DType.BOOL: "Bool",
}
"""The names in a dump of the dtypes that are sent: torch's backends send floats of 8 bits as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A process group. Torch numbers groups in the order of their creation, from 0 for the world."""

    number: int
    description: str
    ranks: tuple[int, ...]


def flight_recorder_dumps(
    program: Program, *, source: str, backend: str = "nccl"
) -> Iterator[dict[str, Plain]]:
    """Yield the dump of each rank in order, after all collectives of a step were scheduled and before any started.

    ``source`` is the file of the program. The frame of an entry has it, the op, and the index of the op in its section.
    """
    launches = list(_launches(program, source, backend))
    groups = _groups(program)
    for rank in range(program.mesh.world_size):
        yield _dump(launches, [group for group in groups if rank in group.ranks])


def _groups(program: Program) -> list[_Group]:
    world = tuple(range(program.mesh.world_size))
    groups = [_Group(number=0, description="default_pg", ranks=world)]
    for comm in program.comms:
        for ranks in program.mesh.groups(comm.axis):
            groups.append(_Group(number=len(groups), description=comm.name, ranks=ranks))
    return groups


def _dump(
    launches: Sequence[tuple[str, Mapping[str, Plain]]], groups: Sequence[_Group]
) -> dict[str, Plain]:
    """Return the dump of a rank that belongs to these groups; the world is the first of them."""
    group_by_comm = {group.description: group for group in groups[1:]}
    issued = dict.fromkeys((group.number for group in groups), 0)
    entries: list[Plain] = []
    for record, (comm, launch) in enumerate(launches):
        group = group_by_comm[comm]
        issued[group.number] += 1
        entries.append(
            {
                "record_id": record,
                "pg_id": group.number,
                "process_group": (str(group.number), group.description),
                "collective_seq_id": issued[group.number],
                "op_id": issued[group.number],
                **launch,
            }
        )
    return {
        "version": FORMAT_VERSION,
        "comm_lib_version": "",
        "entries": entries,
        "pg_config": {
            str(group.number): {
                "name": str(group.number),
                "desc": group.description,
                "ranks": str(list(group.ranks)),
            }
            for group in groups
        },
        "pg_status": {
            str(number): {
                "last_enqueued_collective": count,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for number, count in issued.items()
        },
    }


def _launches(
    program: Program, source: str, backend: str
) -> Iterator[tuple[str, Mapping[str, Plain]]]:
    """Yield the launches of one step in the order in which the host issues them, which is the same on all ranks.

    Each is a communicator and the fields of an entry that are the same on all ranks.
    """
    names = labels(program)
    for section in step_sections(program):
        for position, op in section.positioned_ops():
            if not isinstance(op, ops.Collective):
                continue
            frame: Plain = {"name": names[position], "filename": source, "line": position.index}
            for dtype, pairs in _by_dtype(program, op).items():
                sources = [pair.source.local_numel(program.mesh) for pair in pairs]
                destinations = [pair.destination.local_numel(program.mesh) for pair in pairs]
                yield (
                    op.comm,
                    {
                        "p2p_seq_id": 0,
                        "profiling_name": f"{backend}:{_kind(op, len(pairs))}",
                        "time_created_ns": 0,
                        "input_sizes": [[numel] for numel in sources],
                        "input_dtypes": [_SCALAR_TYPES[dtype]] * len(pairs),
                        "output_sizes": [[numel] for numel in destinations],
                        "output_dtypes": [_SCALAR_TYPES[dtype]] * len(pairs),
                        "state": "scheduled",
                        "time_discovered_started_ns": None,
                        "time_discovered_completed_ns": None,
                        "retired": False,
                        "timeout_ms": DEFAULT_TIMEOUT_MS,
                        "is_p2p": False,
                        "thread_id": "0",
                        "thread_name": "zeroir",
                        "frames": [frame],
                    },
                )


def _by_dtype(program: Program, op: ops.CollectiveOp) -> dict[DType, list[ops.Pair]]:
    """Group the pairs of a collective by the dtype on the wire; those of one dtype are launched together."""
    pairs_by_dtype: dict[DType, list[ops.Pair]] = {}
    for pair in op.pairs:
        dtype = op.wire_dtype or program.buffer_by_name[pair.source.buffer].dtype
        pairs_by_dtype.setdefault(dtype, []).append(pair)
    return pairs_by_dtype


def _kind(op: ops.CollectiveOp, pairs: int) -> str:
    """Return torch's name of the collective in its records, for one tensor or several at once."""
    match op:
        case ops.Gather():
            return "_all_gather_base" if pairs == 1 else "all_gather_into_tensor_coalesced"
        case ops.ReduceScatter():
            return "_reduce_scatter_base" if pairs == 1 else "reduce_scatter_tensor_coalesced"
        case ops.AllReduce():
            return "all_reduce" if pairs == 1 else "allreduce_coalesced"
        case ops.Broadcast():
            return "broadcast"
        case _:
            assert_never(op)
