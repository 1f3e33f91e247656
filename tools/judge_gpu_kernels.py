"""Compare what Inductor compiles for GPUs with eager kernels, on a device that is not there.

    python -m tools.judge_gpu_kernels [MODEL ...] [--record FILE]

``tests/support/absent_cuda`` says how. Every kernel of every distinct segment of these models is compiled to binaries
of three architectures. The code of one of them runs in an interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from tests.support.absent_cuda import PACKAGES
from tools import record_file

ROOT: Final = Path(__file__).parents[1]
ARCHITECTURES: Final = (90, 80, 100)
HEAD: Final = [
    *("model", "precision", "segments", "as functions", "launches of kernels"),
    *("unaligned destinations", "binaries for", "results beyond the bound"),
]


class JudgedModel(NamedTuple):
    """A model file, and the options that it is compiled with."""

    path: str
    precision: str = "fp32"
    evaluate: bool = False


CASES: Final = {
    "GPT": JudgedModel("examples/gpt.py"),
    "Llama, grouped heads": JudgedModel("tests/support/models/llama.py", "bf16"),
    "BERT, masked attention": JudgedModel("tests/support/models/bert.py", "bf16"),
    "T5": JudgedModel("tests/support/models/t5.py"),
    "ViT": JudgedModel("tests/support/models/vit.py", "fp16"),
    "convolutions and BatchNorm": JudgedModel("tests/support/models/convnet.py", evaluate=True),
    "mixture of experts": JudgedModel("tests/support/models/experts.py:mixtral"),
}


def row(name: str, case: JudgedModel) -> list[str]:
    """Judge a model, and return its row of the table.

    Raises:
        subprocess.CalledProcessError: where something does not compile.
    """
    with TemporaryDirectory() as folder:
        request = {
            "folder": folder,
            "model": str(ROOT / case.path),
            "options": {"precision": case.precision, "evaluate": case.evaluate},
            "architectures": ARCHITECTURES,
        }
        command = [sys.executable, "-m", "tests.support.absent_cuda.judge", json.dumps(request)]
        answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    kinds = Counter(segment["library"] for segment in found)
    return [
        name,
        case.precision,
        str(len(found)),
        str(kinds["_SegmentFunction"]),
        str(sum(len(segment["launched"]) for segment in found)),
        str(sum(segment["unaligned"] for segment in found)),
        ", ".join(f"sm_{architecture}" for architecture in sorted(ARCHITECTURES)),
        str(sum(len(segment["differences"]) for segment in found)),
    ]


def main() -> int:
    """Print the table; the exit status is 1 where a result is beyond its bound."""
    parser = record_file.parser(__doc__ or "")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {'; '.join(CASES)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - CASES.keys():
        parser.error(f"There is no model {unknown.pop()!r}: choose from {'; '.join(CASES)}.")
    if not PACKAGES.is_dir():
        parser.error(f"Triton and the headers of CUDA are not in {PACKAGES}: run `make setup`.")
    rows = [row(name, CASES[name]) for name in chosen.models or CASES]
    record_file.publish(chosen.record, "judge_gpu_kernels", HEAD, rows)
    return int(any(cells[-1] != "0" for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
