"""The optimizer on the host of a GPU: the CPU's update, pinned memory, the device's bytes, and the host's threads."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.support import (
    MLP_TOLERANCE,
    SEED,
    held_bytes,
    losses_of,
    requested_bytes,
    result_bytes,
    torch_stream,
)
from tests.runtime.support import initial_flats, random_batches
from tests.support.lockstep import run_lockstep
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.errors import GraphWarning
from zeroir.ir.buffers import Role, Space
from zeroir.ir.mesh import OPTIMIZER, Executor
from zeroir.ir.program import Program
from zeroir.passes.base import Pass
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.cuda_graphs import WARM_UP
from zeroir.runtime.execution.host_threads import update_threads

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 1_000_000_000
"""About half a second, in which a step would be long over."""

WAYS: dict[str, tuple[Pass, ...]] = {
    "optimizer": (OffloadOptimizer(),),
    "half": (OffloadOptimizer(fraction=0.5), OffloadGradients()),
    "both": (OffloadOptimizer(), OffloadGradients()),
}


def scheduled(
    stage: int, way: str, *, precision: str, clip: float | None, micro_steps: int = 1
) -> Program:
    logical = mlp(precision=precision, clip=clip, micro_steps=micro_steps)
    passes = for_stage(stage, 1, overlap_update=clip is None and precision != "fp16")
    return applied(logical, (*passes, *WAYS[way], SaveState(), PlanMemory()))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_follows_the_reference(
    device: torch.device, stage: int, way: str, precision: str, clip: float | None
) -> None:
    program = scheduled(stage, way, precision=precision, clip=clip)
    initial, batches = initial_flats(program), random_batches(WARM_UP + 6, 1)
    expected = run_lockstep(program, initial=initial, inputs=batches)
    # The section with the update is not captured, because the host or a thread works in it.
    with pytest.warns(GraphWarning, match="last_micro_step|update"):
        engine = Engine(program, EngineSettings(seed=SEED, cuda_graphs=True), device=device)
    engine.initialise_flats(initial)
    found = losses_of(engine, [batch for ((batch,),) in batches])
    states = engine.full_state()
    engine.close()
    bound = MLP_TOLERANCE[precision]
    wanted = torch.tensor([losses[0] for losses in expected.losses], dtype=found.dtype)
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    for (flat, quantity), values in states.items():
        if quantity == "param" and (flat, "master") not in states:
            torch.testing.assert_close(
                values.cpu(), expected.state[flat, quantity], rtol=bound, atol=bound
            )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_device_holds_what_the_plan_says_and_the_hosts_buffers_are_pinned(
    device: torch.device, stage: int, way: str
) -> None:
    """The first engine lets libraries allocate what they keep; torch's allocator is the judge of the second."""
    program = scheduled(stage, way, precision="bf16", clip=None)
    (((batch,),),) = random_batches(1, 1)
    for is_warm in (False, True):
        requested = requested_bytes()
        engine = Engine(program, EngineSettings(seed=SEED), device=device)
        engine.initialise_flats(initial_flats(program))
        for _ in range(2):
            engine.step(batch)
            engine.finish()
        if is_warm:
            held = [*held_bytes(program), *result_bytes(engine)]
            assert requested_bytes() - requested == sum(held)
        on_host = [b for b in program.buffers if b.space is Space.HOST and b.is_persistent]
        states = [b for b in on_host if b.role in (Role.MASTER, Role.STATE)]
        assert states
        assert all(engine.buffer(buffer.name).is_pinned() for buffer in states)
        engine.close()
        del engine  # which has its buffers until then


def test_the_update_has_the_cores_of_the_rank_and_the_issuing_thread_goes_on(
    device: torch.device,
) -> None:
    program = scheduled(3, "optimizer", precision="bf16", clip=None)
    engine = Engine(program, EngineSettings(seed=SEED), device=device)
    engine.initialise_flats(initial_flats(program))
    streams = engine.rank_program.executor._streams
    assert isinstance(streams, CudaStreams)
    assert streams._apart == {"update_in", "update_out"}
    used: list[int] = []
    streams._threads.call(
        OPTIMIZER, lambda: streams._on_host(lambda: used.append(torch.get_num_threads()))
    )
    (((batch,),),) = random_batches(1, 1)
    engine.step(batch)
    engine.finish()
    assert used == [update_threads()]
    engine.close()


def test_states_are_read_when_the_device_has_copied_them_to_the_host(device: torch.device) -> None:
    """The copies of the last pages are late: they wait on their streams for half a second."""
    program = applied(
        mlp(dim=64), (*for_stage(2, 1), PageOptimizer(device_bytes=1 << 15, page_bytes=1 << 12))
    )
    engine = Engine(program, EngineSettings(seed=SEED), device=device)
    engine.initialise_flats(initial_flats(program))
    streams = engine.rank_program.executor._streams
    assert isinstance(streams, CudaStreams)
    on_device = [s.name for s in program.streams if s.executor is Executor.DEVICE]
    for ((batch,),) in random_batches(2, 1):
        for name in on_device:
            if name in streams._streams:
                with torch.cuda.stream(torch_stream(streams, name)):
                    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        engine.step(batch)
        early = {key: values.cpu() for key, values in engine.full_state().items()}
        torch.cuda.synchronize(device)
        late = {key: values.cpu() for key, values in engine.full_state().items()}
        assert all(torch.equal(early[key], late[key]) for key in late)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_micro_batches_unit_by_unit_follow_the_reference(device: torch.device, stage: int) -> None:
    """Inputs and weights are in slices, and parameters visit the device once for all micro-batches."""
    order = OrderByLayer(micro_batches=4, whole_step=True)
    passes = for_stage(stage, 1, order=order, overlap_update=True)
    logical = mlp(precision="bf16", micro_steps=4)
    program = applied(logical, (*passes, OffloadParameters(), PlanMemory()))
    initial, batches = initial_flats(program), random_batches(4, 1, 4)
    expected = run_lockstep(program, initial=initial, inputs=batches)
    engine = Engine(program, EngineSettings(seed=SEED), device=device)
    engine.initialise_flats(initial)
    found = torch.tensor([engine.step(own).loss for (own,) in batches])
    engine.close()
    bound = MLP_TOLERANCE["bf16"]
    wanted = torch.tensor([losses[0] for losses in expected.losses], dtype=found.dtype)
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
