"""Measure certificates of schedules of more and more layers: their size, and the time of the checks.

The collector of garbage is off while checks run.

python -m tools.bench_certificates --record docs/records/certificate-times.json
"""

from __future__ import annotations

import gc
import sys
import time

import msgpack

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tools import record_file
from tools.certificates.__main__ import check
from tools.damage_certificates import file_of
from zeroir.verify import verify
from zeroir.verify.certificate.certificate import certificate

LAYERS = (10, 20, 40, 80, 160)
RANKS = 8
_REPEATS = 3


def row(layers: int) -> list[float]:
    """Ops of the schedule, bytes of file and certificate, and seconds of the verifier and of the check."""
    logical = mlp(blocks=layers, precision="bf16", clip=1.0)
    scheduled = applied(logical, for_stage(3, RANKS))
    data = file_of(logical, scheduled)
    claims = msgpack.packb(certificate(scheduled, logical, data[20:52]))
    seconds: list[list[float]] = [[], []]
    gc.collect()
    gc.disable()
    for _ in range(_REPEATS):
        start = time.process_time()
        verify(scheduled, logical)
        middle = time.process_time()
        check(data, claims)
        seconds[0].append(middle - start)
        seconds[1].append(time.process_time() - middle)
    gc.enable()
    return [
        sum(1 for _ in scheduled.ops()),
        len(data),
        len(claims),
        *map(min, seconds),
    ]


def main() -> int:
    """Print one line for each number of layers."""
    parser = record_file.parser(__doc__ or "")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    before = 0.0
    for layers in LAYERS:
        ops, size, claims, proof, checked = row(layers)
        ratio = f"{checked / before:.2f}" if before else "–"
        before = checked
        sizes = [f"{ops:,.0f}", f"{size / 1e3:,.0f} kB", f"{claims / 1e3:,.0f} kB"]
        rows.append([str(layers), *sizes, f"{proof:.2f} s", f"{checked:.2f} s", ratio])
    head = ["layers", "ops", "program", "certificate", "`verify`", "check", "of half as many"]
    record_file.publish(arguments.record, "bench_certificates", head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
