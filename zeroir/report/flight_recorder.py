"""What PyTorch's Flight Recorder would hold on each rank once a step was issued: one dump a rank.

``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` compares such dumps across ranks, and so gives an
opinion of the program's order that is not ours; the dumps of a job that hangs can be laid beside these. The format is
that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, version 2.10, as torch 2.13 writes and reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.dtypes import DType
from zeroir.ir.labels import labels
from zeroir.ir.program import Program
from zeroir.report.plain_pickle import Plain
from zeroir.report.step import step_sections

FORMAT_VERSION: Final = "2.10"
DEFAULT_TIMEOUT_MS: Final = 600_000
"""What torch writes where nobody chose a timeout: ten minutes."""

_SCALAR_TYPES: Final = {
    DType.F64: "Double",
    DType.F32: "Float",
    DType.F16: "Half",
    DType.BF16: "BFloat16",
    DType.I64: "Long",
    DType.I32: "Int",
    DType.I16: "Short",
    DType.I8: "Char",
    DType.U8: "Byte",
    DType.BOOL: "Bool",
}
"""What torch calls its dtypes in a dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A process group as torch numbers it: in the order of creation, the world first."""

    number: int
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What one op gives its group in one go: the pieces of one element type."""

    comm: str
    kind: str
    dtype: DType
    input_numels: tuple[int, ...]
    output_numels: tuple[int, ...]
    label: str
    index: int


def flight_recorder_dumps(
    program: Program, *, source: str, backend: str = "nccl"
) -> Iterator[dict[str, Plain]]:
    """The dump of every rank, in rank order, of one step whose collectives are all scheduled and none has begun.

    ``source`` is the program's file, which stands in every entry's frame beside the op and its place in the section.
    """
    launches = list(_launches(program))
    groups = _groups(program)
    for rank in range(program.mesh.world_size):
        own = [group for group in groups if rank in group.ranks]
        of_comm = {group.description: group for group in own[1:]}
        yield _dump(launches, own, of_comm, source, backend)


def _groups(program: Program) -> list[_Group]:
    world = tuple(range(program.mesh.world_size))
    found = [_Group(number=0, description="default_pg", ranks=world)]
    for comm in program.comms:
        for ranks in program.mesh.groups(comm.axis):
            found.append(_Group(number=len(found), description=comm.name, ranks=ranks))
    return found


def _dump(
    launches: Sequence[_Launch],
    own: Sequence[_Group],
    of_comm: dict[str, _Group],
    source: str,
    backend: str,
) -> dict[str, Plain]:
    issued = dict.fromkeys((group.number for group in own), 0)
    entries: list[Plain] = []
    for record, launch in enumerate(launches):
        group = of_comm[launch.comm]
        issued[group.number] += 1
        frame: Plain = {"name": launch.label, "filename": source, "line": launch.index}
        entries.append(
            {
                "record_id": record,
                "pg_id": group.number,
                "process_group": (str(group.number), group.description),
                "collective_seq_id": issued[group.number],
                "p2p_seq_id": 0,
                "op_id": issued[group.number],
                "profiling_name": f"{backend}:{launch.kind}",
                "time_created_ns": 0,
                "input_sizes": [[numel] for numel in launch.input_numels],
                "input_dtypes": [_SCALAR_TYPES[launch.dtype]] * len(launch.input_numels),
                "output_sizes": [[numel] for numel in launch.output_numels],
                "output_dtypes": [_SCALAR_TYPES[launch.dtype]] * len(launch.output_numels),
                "state": "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": False,
                "timeout_ms": DEFAULT_TIMEOUT_MS,
                "is_p2p": False,
                "thread_id": "0",
                "thread_name": "zeroir",
                "frames": [frame],
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
            for group in own
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


def _launches(program: Program) -> Iterator[_Launch]:
    """What every rank launches in one step, in the host's order: the program is the same for all."""
    names = labels(program)
    for section in step_sections(program):
        for position, op in section.positioned_ops():
            if not isinstance(op, ops.Collective):
                continue
            for dtype, pairs in _by_dtype(program, op).items():
                yield _Launch(
                    comm=op.comm,
                    kind=_kind(op, len(pairs)),
                    dtype=dtype,
                    input_numels=tuple(pair.source.local_numel(program.mesh) for pair in pairs),
                    output_numels=tuple(
                        pair.destination.local_numel(program.mesh) for pair in pairs
                    ),
                    label=names[position],
                    index=position.index,
                )


def _by_dtype(program: Program, op: ops.CollectiveOp) -> dict[DType, list[ops.Pair]]:
    """The pairs that travel together: those of one element type."""

    def travels(region: Region) -> DType:
        return op.wire_dtype or program.buffer_by_name[region.buffer].dtype

    found: dict[DType, list[ops.Pair]] = {}
    for pair in op.pairs:
        found.setdefault(travels(pair.source), []).append(pair)
    return found


def _kind(op: ops.CollectiveOp, pairs: int) -> str:
    """What torch calls the collective in its records, on one tensor or on several at once."""
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
