"""Compares what Inductor compiles for a GPU with eager kernels: ``python -m tests.support.absent_cuda.judge``.

Its argument is a JSON object: ``folder``, an empty folder; ``model``, a model file; ``options`` of ``zeroir.compile``;
``architectures``. It trains a step of the model, compiles every distinct segment as it was called, and runs it on the
same arguments. Destinations that need not be aligned are not. Its last line is a JSON list with an object for each
segment.
"""

from __future__ import annotations

# isort: off
from tests.support.absent_cuda.interpreted_kernels import InterpretedKernels

# isort: on
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import zeroir
from tests.support.absent_cuda.compiling import KERNELS, REQUEST
from tests.support.absent_cuda.library import build_toolkit, load
from tests.support.recorded_calls import Call, RecordingKernels, copies, held
from zeroir.api.model_of_program import load_model
from zeroir.runtime.engine import opened_program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.kernels import _inductor_libraries, graph
from zeroir.runtime.kernels.compile_worker import Request, packed
from zeroir.runtime.kernels.differences import difference, is_beyond_noise, tolerance
from zeroir.runtime.kernels.eager import EagerKernels
from zeroir.runtime.kernels.inductor import _LibraryKernel
from zeroir.runtime.kernels.self_check import _disturb
from zeroir.torch_ops.opaque import words_of
from zeroir.torch_ops.purity import declarations

CUDA = torch.device("cuda", 0)


def recorded(model: Path, options: dict[str, Any]) -> list[Call]:
    """Return the distinct calls of a step of a model."""
    compiled = zeroir.compile(model, world_size=1, **options)
    recording = RecordingKernels()
    model_file = load_model(compiled.artifact, compiled.path)
    with patch.object(opened_program, "open_kernels", lambda *_: recording):
        engine = Engine(compiled.program, EngineSettings())
        engine.initialise(model_file.model, seed=0)
        engine.step(model_file.batch())
        engine.close()
    return [call for call in recording.calls if not words_of([call.segment])]


def write_request(call: Call, folder: Path) -> None:
    """Ask for a segment's library in a new folder."""
    folder.mkdir()
    request = Request(
        segment=call.segment,
        operators=declarations(node.op for node in call.segment.nodes),
        bindings=call.bindings,
        device=str(CUDA),
        threads=1,
        folder="",
    )
    (folder / REQUEST).write_bytes(packed(request))


def compare(call: Call, folder: Path, kernels: InterpretedKernels) -> dict[str, object]:
    """Run a compiled segment on the arguments of its call, and say how its results differ."""
    first = len(kernels.launched)
    kernels.add(folder / KERNELS)
    with (
        patch.object(_inductor_libraries, "_current_stream", lambda _: 0),
        patch.object(_inductor_libraries, "_runner", _runner),
    ):
        library = _inductor_libraries.load_library(folder / "library", CUDA)
        outputs = graph.graph_outputs(call.bindings)
        run = _LibraryKernel(library=library, outputs=outputs, bindings=call.bindings)
        unaligned = [binding is not None and not binding.is_aligned for binding in call.bindings]
        places = {
            id(before): placed(before, is_aligned=not is_unaligned)
            for before, is_unaligned in zip(call.before, unaligned, strict=True)
            if before is not None
        }
        destinations = [None if before is None else places[id(before)] for before in call.before]
        run(call.arguments, destinations)
    allowed = tolerance(call.segment)
    found = zip(destinations, call.after, after_rounding(call), strict=True)
    return {
        "segment": call.segment.name,
        "library": type(library).__name__,
        "launched": kernels.launched[first:],
        "unaligned": sum(unaligned),
        "differences": [
            text
            for result, wanted, noisy in found
            if result is not None and wanted is not None and noisy is not None
            if (text := difference(result, wanted, allowed)) is not None
            and is_beyond_noise(result, wanted, noisy)
        ],
    }


def after_rounding(call: Call) -> list[Tensor | None]:
    """Return the results of eager kernels where each argument is rounded otherwise."""
    arguments = [held(argument) for argument in call.arguments]
    for argument in arguments:
        _disturb(argument)
    destinations = copies(call.before)
    EagerKernels(torch.device("cpu")).compile(call.segment, call.bindings)(arguments, destinations)
    return destinations


def _runner(path: Path, device: torch.device) -> _inductor_libraries.Library:
    """Return a container's function by torch's runner for the CPU, which knows no binaries beside the library."""
    del device
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run


def placed(tensor: Tensor, *, is_aligned: bool) -> Tensor:
    """Return a copy with the same strides, one element beyond an aligned address or at one."""
    around = torch.empty_strided([2, *tensor.shape], [1, *tensor.stride()], dtype=tensor.dtype)
    return around[0 if is_aligned else 1].copy_(tensor)


def main(
    *, folder: str, model: str, options: dict[str, Any], architectures: list[int]
) -> list[dict[str, object]]:
    """Return what was found of each segment."""
    calls = recorded(Path(model), options)
    root, segments = Path(folder), Path(folder) / "segments"
    segments.mkdir()
    for number, call in enumerate(calls):
        write_request(call, segments / f"{number:03}")
    toolkit = root / "toolkit"
    build_toolkit(toolkit)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.absent_cuda.compiling", toolkit, segments),
            *map(str, architectures),
        ],
        env=environment | {name: str(root / place) for name, place in caches.items()},
        check=True,
    )
    kernels = InterpretedKernels(load(toolkit))
    return [compare(call, segments / f"{number:03}", kernels) for number, call in enumerate(calls)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(**json.loads(sys.argv[1]))))
