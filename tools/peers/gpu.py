"""One rank of one contestant on a GPU: warms up, measures, and reports as JSON.

    python -m tools.peers.gpu '{"contestant": ..., ...}'

Parameters and moments are FP32 shards, gathered parameters and computation are bf16, gradients travel as bf16, and the
update is torch's fused AdamW: in zeroir with ``--precision bf16``, in FSDP2 by its mixed-precision policy.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist

from tools.peers import gpu_gpt
from tools.peers.gpt_model import TakeStep, training_step
from zeroir.errors import GraphWarning, KernelWarning

LEARNING_RATE = 1e-4
SEED = 0
BATCHES = 4
"""As many random batches lie on the device, and are taken in turn."""

SETTLE = 3
"""Steps between the emptying of the allocator's cache after the warm-up and the first step that counts."""

NAMES = (
    "FSDP2",
    "FSDP2 compiled",
    "zeroir 3",
    "zeroir 3 graphs",
    "zeroir 3 inductor",
    "zeroir 3 inductor graphs",
)


@dataclass(frozen=True, kw_only=True)
class MeasurementTask:
    """The measurement that one process makes. ``group`` is ``fake``, whose collectives move nothing, or ``nccl``."""

    contestant: str
    group: str
    world_size: int
    rank: int
    warm_up: int
    steps: int
    program: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of one process; bytes are the peaks of torch's allocator during the measured steps.

    ``notes`` say where the contestant ran differently from its name.
    """

    seconds: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def measure(task: MeasurementTask) -> Measurement:
    """Take the steps of a task on the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    join(task)
    step = build(task, device)
    batches = [
        (tokens.to(device), targets.to(device))
        for tokens, targets in gpu_gpt.random_batches(BATCHES, seed=task.rank)
    ]
    start = time.perf_counter()
    losses = [float(step(batches[0]))]
    first = time.perf_counter() - start
    losses.extend(float(step(batches[i % BATCHES])) for i in range(1, task.warm_up))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for index in range(SETTLE):
        step(batches[index % BATCHES])
    # The host runs ahead, as in training, so a step lasts until the next one begins on the device.
    begins = [_timed_event() for _ in range(task.steps + 1)]
    for index in range(task.steps):
        begins[index].record()
        step(batches[index % BATCHES])
    begins[-1].record()
    torch.cuda.synchronize(device)
    if task.group == "nccl":
        dist.barrier()  # no rank ends while another may still read its memory
    return Measurement(
        seconds=[float(a.elapsed_time(b)) / 1000 for a, b in itertools.pairwise(begins)],
        first_step_seconds=first,
        losses=losses,
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def join(task: MeasurementTask) -> None:
    """Become a rank of the group that the task names."""
    if task.group == "fake":
        from tests.support.fake_world import join_fake_world

        join_fake_world(task.rank, task.world_size)
        return
    dist.init_process_group(
        "nccl",
        init_method=f"file://{task.folder}/store",
        rank=task.rank,
        world_size=task.world_size,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )


def build(task: MeasurementTask, device: torch.device) -> TakeStep:
    """The contestant of that name."""
    match task.contestant.split():
        case ["FSDP2", *options]:
            return _fully_sharded(task.world_size, is_compiled="compiled" in options)
        case ["zeroir", _, *options]:
            return _zeroir(task, device, options)
        case _:
            raise ValueError(f"there is no contestant {task.contestant}")


def _fully_sharded(world_size: int, *, is_compiled: bool) -> TakeStep:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(SEED)
    model = gpu_gpt.model()
    if is_compiled:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, fullgraph=True)  # type: ignore[assignment,unused-ignore]
    mesh = init_device_mesh("cuda", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return training_step(model, optimizer)


def _zeroir(task: MeasurementTask, device: torch.device, options: list[str]) -> TakeStep:
    import zeroir
    from zeroir.api.model_of_program import load_model
    from zeroir.runtime.comm.job import Backend
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.opened_program import EngineSettings
    from zeroir.runtime.kernels.choice import KernelBackend

    compiled = zeroir.load(task.program)
    engine = Engine(
        compiled.program,
        EngineSettings(
            backend=Backend(task.group) if task.world_size > 1 else Backend.LOCAL,
            kernels=KernelBackend.INDUCTOR if "inductor" in options else KernelBackend.EAGER,
            seed=SEED,
            cuda_graphs="graphs" in options,
        ),
        device=device,
    )
    engine.initialise(load_model(compiled.artifact, compiled.path).model, SEED)
    return lambda batch: engine.step(batch).rank.loss


def main() -> None:
    """Measure, and write the report where nothing else is printed."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = MeasurementTask(**json.loads(sys.argv[1]))
    torch.cuda.set_device(0)
    fallbacks = (GraphWarning, KernelWarning)
    with warnings.catch_warnings(record=True) as caught:
        for category in fallbacks:
            warnings.simplefilter("always", category)
        measurement = measure(task)
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, fallbacks)]
    reports.write(json.dumps(asdict(replace(measurement, notes=notes))) + "\n")
    reports.flush()
    os._exit(0)  # groups may have threads that an ordinary exit would wait for


if __name__ == "__main__":
    main()
