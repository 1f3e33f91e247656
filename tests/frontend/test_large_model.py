"""A model of 7.5 billion parameters is traced without allocating a weight."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json
from tests.support.resident import peak_resident_bytes
from zeroir.config import make_options
from zeroir.frontend import load_model_file, trace

model_file = load_model_file("tests/support/models/big_gpt.py")
program = trace(model_file, make_options({"world_size": 1, "precision": "bf16"})).program
print(json.dumps([program.parameters_numel, len(program.segments), peak_resident_bytes()]))
"""


@pytest.mark.slow
def test_tracing_a_large_model_takes_less_than_a_gigabyte() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )  # fmt: skip
    numel, segments, peak_bytes = json.loads(result.stdout)
    assert numel > 7.4e9
    # Forward, backward and evaluation of the blocks and of the two parts of the root.
    assert segments == 10  # one of them counts labels
    assert peak_bytes < 10**9
