"""Engines whose optimizer and parameters are on disk: every value is that of an engine without a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.passes.test_offload_to_disk import whole_page_bytes
from tests.runtime.constructors import Mlp
from tests.runtime.disk_workers import STEPS, TO_DISK, plain
from tests.runtime.support import (
    Ranks,
    begun,
    lowered,
    random_batches,
    require_equal,
    require_run,
    require_success,
)
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.process_bytes import disk_bytes
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.passes import manager
from zeroir.passes.manager import apply
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.memory import rank_memory

MODULE = "tests.runtime.disk_workers"
DIM = 96


def engines(folder: Path, precision: str = "bf16") -> tuple[Engine, Engine]:
    """One without a disk, and one with everything there, initialised alike."""
    program = lowered(mlp(dim=DIM, precision=precision, ema=0.9), 3, 1)
    moved = program
    for step in TO_DISK:
        moved = apply(step, moved)
    assert {b.name for b in moved.buffers if b.space is Space.DISK}
    found = Engine(program), Engine(moved, EngineSettings(disk_folder=folder))
    for engine in found:
        engine.initialise(lambda: Mlp(dim=DIM), seed=3)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whoever_asks_for_values_gets_the_same(tmp_path: Path, precision: str) -> None:
    without, with_disk = engines(tmp_path, precision)
    batches = random_batches(3, 1)
    for number in range(2):
        for batch in batches[number]:
            assert with_disk.step(batch).loss == without.step(batch).loss
        for method in ("state_dict", "optimizer_state_dict", "full_parameters", "full_state"):
            require_equal(getattr(with_disk, method)(), getattr(without, method)())
        require_equal(with_disk.full_parameters(ema=True), without.full_parameters(ema=True))
        require_equal(dict(with_disk.parameters()), dict(without.parameters()))
        with with_disk.gathered() as module, without.gathered() as expected:
            require_equal(dict(module.named_parameters()), dict(expected.named_parameters()))
        other = {name: value * 0.5 for name, value in without.state_dict().items()}
        for engine in (with_disk, without):
            engine.load_state_dict(other)
    assert with_disk.step(batches[2][0]).loss == without.step(batches[2][0]).loss
    for buffer in without.program.buffers:
        if buffer.is_persistent:
            require_equal(with_disk.buffer(buffer.name), without.buffer(buffer.name))


def test_linux_counts_the_bytes_of_the_program(tmp_path: Path) -> None:
    _, engine = engines(tmp_path)
    disk = engine.rank_program.memory.disk
    if not disk.is_direct:
        pytest.skip("this file system has no direct reads and writes")
    first, second, _ = random_batches(3, 1)
    engine.step(first[0])
    engine.finish()
    before = disk_bytes()
    engine.step(second[0])
    engine.finish()
    moved = [after - earlier for after, earlier in zip(disk_bytes(), before, strict=True)]
    for kind, found in zip((ops.Load, ops.Store), moved, strict=True):
        transfers = [op for op in engine.program.step_ops() if isinstance(op, kind)]
        assert len(transfers) > 10
        assert found == sum(whole_page_bytes(engine.program, op) for op in transfers)


@pytest.mark.slow
def test_checkpoints_are_the_same(tmp_path: Path) -> None:
    """Each engine goes on with what the other saved; training waits for the one on disk."""
    without, with_disk = engines(tmp_path)
    batches = random_batches(3, 1)
    for engine, name in ((without, "device"), (with_disk, "disk")):
        engine.step(batches[0][0])
        assert engine.save(tmp_path / name).path == str(tmp_path / name)
    pending = with_disk.save(tmp_path / "again", wait=False)
    assert pending.is_done
    with_disk.step(batches[1][0])
    without.load(tmp_path / "again")
    with_disk.load(tmp_path / "device")
    require_equal(with_disk.full_state(), without.full_state())
    assert with_disk.step(batches[2][0]).loss == without.step(batches[2][0]).loss


@pytest.mark.slow
def test_values_between_steps_go_through_memory_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_memory, "CHUNK_BYTES", 8192)
    without, with_disk = engines(tmp_path)
    batch = random_batches(1, 1)[0][0]
    for engine, name in ((without, "device"), (with_disk, "disk")):
        engine.step(batch)
        engine.save(tmp_path / name)
    memory = with_disk.rank_program.memory
    largest = max(
        (b for b in with_disk.program.buffers if b.space is Space.DISK), key=lambda b: b.size_bytes
    )
    chunks = [chunk.clone() for chunk in memory.read_in_chunks(largest.name, 3)]
    assert max(chunk.nbytes for chunk in chunks) == 8192
    require_equal(torch.cat(chunks), memory.read(largest.name)[3:])
    with_disk.load(tmp_path / "device")
    without.load(tmp_path / "disk")
    require_equal(with_disk.full_state(), without.full_state())


@pytest.mark.slow
def test_a_program_for_several_batches_takes_over_what_is_on_disk(tmp_path: Path) -> None:
    found: list[list[float]] = []
    for moves in (False, True):
        programs = []
        for micro_steps in (1, 2):
            program = lowered(mlp(dim=DIM, precision="bf16", micro_steps=micro_steps), 2, 1)
            for step in TO_DISK if moves else ():
                program = apply(step, program)
            programs.append(program)
        engine = Engine(
            programs[0], EngineSettings(disk_folder=tmp_path), accumulating=programs[1:].pop
        )
        engine.initialise(lambda: Mlp(dim=DIM), seed=3)
        first, second = random_batches(2, 1, micro_steps=2)
        losses = [engine.step(first[0][0]).loss, engine.step(second[0]).loss]
        losses.append(engine.step(second[0]).loss)
        found.append(losses)
    assert found[0] == found[1]


class Net(nn.Module):
    """A flat of several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 32))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.slow
def test_states_of_8_bits_are_updated_in_pieces(tmp_path: Path) -> None:
    batch = (torch.randn(4, 32),)
    logical = zeroir.compile(Net(), batch, precision="bf16", optimizer_bits=8).logical
    passes = for_stage(2, 1)
    moved = manager.run(applied(logical, passes), TO_DISK, reference=logical)
    scales = {op.scales[0].numel for op in moved.ops() if isinstance(op, ops.OptimizerStep)}
    assert len(scales) == 2, "whole pieces, and the rest"
    states = []
    for program in (applied(logical, passes), moved):
        torch.manual_seed(5)
        engine = Engine(program, EngineSettings(disk_folder=tmp_path))
        engine.initialise(Net, seed=1)
        states.append(([engine.step(batch).loss for _ in range(3)], engine.full_state()))
    assert states[0][0] == states[1][0]
    require_equal(states[1][1], states[0][1])


@pytest.mark.slow
@pytest.mark.dist
def test_two_jobs_share_a_folder_and_leave_nothing_there(tmp_path: Path) -> None:
    """Three ranks, and another job of one rank, save and resume at once; each computes what lockstep does."""
    (tmp_path / "disk").mkdir()
    jobs = {"three": (3, "fp16", 2), "one": (1, "fp32", 3)}
    running = [
        Ranks(world_size, tmp_path, name, precision, str(stage), module=MODULE)
        for name, (world_size, precision, stage) in jobs.items()
    ]
    for ranks in running:
        require_success(ranks.wait())
    assert list((tmp_path / "disk").iterdir()) == []
    for name, (world_size, precision, stage) in jobs.items():
        lockstep = begun(Lockstep(plain(precision, stage, world_size)))
        batches = random_batches(STEPS, world_size, micro_steps=2)
        losses = [float(lockstep.step(ranks)[0].loss) for ranks in batches]
        require_run(tmp_path / f"{name}.safetensors", losses, lockstep.full_state())
