"""The code that Inductor generates for whole models copies no matrix parameter and no gradient of one.

The code is read and not compiled. What copies a matrix has it and something else of its size as operands of one call;
matrix products have too, but they compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import zeroir
from tests.runtime.support import ROOT
from zeroir.ir.buffers import Role, View
from zeroir.ir.ops import Compute
from zeroir.ir.program import Program
from zeroir.ir.segments.bindings import bindings
from zeroir.runtime.kernels import _inductor_private as private
from zeroir.runtime.kernels import graph
from zeroir.runtime.kernels.decompositions import decompositions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

CPU = torch.device("cpu")
FLAT_ROLES = (Role.PARAM, Role.GATHERED, Role.GRAD)
COMPUTING = (
    "aoti_torch_cpu_mm_out",
    "aoti_torch_cpu_addmm_out",
    "aoti_torch_cpu_bmm_out",
    "aoti_torch_cpu_embedding_gradient",
)
"""Matrix products, and the gradient of an embedding, which fills its destination."""
CALL = re.compile(r"^\s*(?:AOTI_TORCH_ERROR_CODE_CHECK\()?(\w+)\((.*)\);", re.MULTILINE)
ARRAY = re.compile(r"int64_t (int_array_\d+)\[\] = \{([^}]*)\}")
EMPTY = re.compile(r"aoti_torch_empty_strided\((\d+), (int_array_\d+).*&(\w+)_handle\)")

Generate = Callable[[Compute], str]


@pytest.fixture
def generate(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Generate:
    """The host code that Inductor makes of a segment, which calls kernels and torch's functions."""
    from torch._inductor.codecache import AotCodeCompiler

    found: list[str] = []

    def read(_graph: object, wrapper: str, *_: object, **__: object) -> str:
        found.append(wrapper)
        return ""

    monkeypatch.setattr(AotCodeCompiler, "compile", staticmethod(read))
    program: Program = request.getfixturevalue("program")

    def of(op: Compute) -> str:
        segment, how = program.segment_by_name[op.segment], bindings(op)
        private.compile_library(
            graph.build_graph(segment, how, CPU),
            graph.input_types(segment, how),
            decompositions(CPU),
            tmp_path,
            CPU,
            host_inputs=graph.host_inputs(segment),
        )
        # What the library tells about itself comes first.
        return found.pop().partition("::run_impl(")[2]

    return of


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Program:
    """A model at stage 3 on one rank."""
    model, precision = request.param
    return zeroir.compile(ROOT / model, stage=3, world_size=1, precision=precision).program


@dataclass(frozen=True)
class Code:
    """What is called with which operands, and how many elements those have as far as that is known."""

    calls: Sequence[tuple[str, tuple[str, ...]]]
    numel: dict[str, int]
    matrices: frozenset[str]

    def copies(self) -> Iterator[str]:
        """Calls that could copy a matrix."""
        for function, operands in self.calls:
            if function in COMPUTING:
                continue
            for name in self.matrices.intersection(operands):
                others = [
                    o for o in operands if o != name and self.numel.get(o) == self.numel[name]
                ]
                if others or not function.startswith("cpp_fused"):
                    yield f"{function}({', '.join(operands)})"


def read(program: Program, op: Compute, text: str) -> Code:
    """What a segment's host code does with its inputs."""
    views: list[View | None] = [argument.view for argument in op.arguments]
    planned = graph.graph_outputs(bindings(op))
    bound = [op.destinations[output] for output in (*planned.direct, *planned.scratch)]
    views += [None if one is None else one.view for one in bound]
    numel: dict[str, int] = {}
    matrices: set[str] = set()
    for index, view in enumerate(views):
        assert view is not None
        numel[f"arg{index}_1"] = math.prod(view.shape)
        role = program.buffer_by_name[view.region.buffer].role
        if role in FLAT_ROLES and len(view.shape) > 1:
            matrices.add(f"arg{index}_1")
    arrays = {
        name: math.prod(map(int, re.findall(r"(\d+)L", row))) for name, row in ARRAY.findall(text)
    }
    for dimensions, array, name in EMPTY.findall(text):
        numel[name] = 1 if dimensions == "0" else arrays[array]
    calls = [
        (function, tuple(dict.fromkeys(re.findall(r"\b(?:arg\d+_1|buf\d+)\b", operands))))
        for function, operands in CALL.findall(text)
        if function.startswith(("cpp_fused", "aoti_torch_"))
    ]
    return Code(calls, numel, frozenset(matrices))


def distinct(program: Program) -> list[Compute]:
    """One call of every segment."""
    return list({op.segment: op for op in program.ops() if isinstance(op, Compute)}.values())


@pytest.mark.parametrize(
    "program",
    [
        ("examples/gpt.py", "fp32"),
        ("tests/support/models/llama.py", "bf16"),
        ("tests/support/models/gpt2.py", "fp32"),
    ],
    indirect=True,
    ids=["gpt", "llama", "gpt2"],
)
def test_no_matrix_is_copied(program: Program, generate: Generate) -> None:
    used = 0
    for op in distinct(program):
        code = read(program, op, generate(op))
        assert list(code.copies()) == [], op.segment
        operands = {name for _, names in code.calls for name in names}
        used += len(code.matrices & operands)
    assert used >= 8


@pytest.mark.parametrize("program", [("examples/gpt.py", "fp32")], indirect=True)
def test_a_copy_is_seen(
    program: Program, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without products that go straight into their destinations, gradients are made elsewhere and copied."""
    monkeypatch.setattr(graph._GraphBuilder, "_fill", lambda *_: False)
    op = next(op for op in distinct(program) if op.segment == "root.post.backward")
    assert list(read(program, op, generate(op)).copies())
