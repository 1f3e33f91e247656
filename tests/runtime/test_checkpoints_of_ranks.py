"""Real processes save checkpoints; the same and other numbers of processes go on with them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.support import Ranks, lowered, random_batches, require_same, require_success
from tests.support.programs import mlp
from zeroir.runtime.execution.lockstep import Lockstep

pytestmark = pytest.mark.dist

MODULE = "tests.runtime.checkpoint_workers"


def run(world_size: int, folder: Path, *args: str) -> list[tuple[int, str, str]]:
    folder.mkdir()
    return Ranks(world_size, folder, *args, module=MODULE).wait()


def require_values(expected: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Whatever the new state has is that of the expected one: a parameter, the trained master, rounded to its dtype."""
    for name, values in state.items():
        flat, _, quantity = name.partition("/")
        source = name
        if quantity in ("param", "master"):
            source = f"{flat}/master" if f"{flat}/master" in expected else f"{flat}/param"
        assert torch.equal(values, expected[source].to(values.dtype)), name


SAVED: Mapping[int, str] = {
    1: "bf16.3,fp32.0",
    2: "fp16.3,bf16.1",
    3: "fp32.0,fp16.1,bf16.2,fp16.3",
    4: "fp16.3.2,fp32.1.2",
}
"""The cases that so many ranks train, save and train on."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder where so many ranks have saved their cases, which all tests of the module load."""

    @cache
    def saved_by(world_size: int) -> Path:
        folder = tmp_path_factory.mktemp("ranks") / str(world_size)
        require_success(run(world_size, folder, "save", SAVED[world_size]))
        return folder

    return saved_by


@pytest.mark.slow
@pytest.mark.parametrize(
    ("savers", "loaders", "loaded"),
    [
        (2, 3, "fp16.2,bf16.3"),
        (3, 2, "bf16.3,fp16.3,fp32.1,fp16.0"),
        (4, 1, "fp16.0,fp32.3"),
        (1, 4, "bf16.0.2,fp16.3.2"),
        (3, 4, "fp32.3,fp16.2.2,bf16.1,fp32.0.2"),
    ],
)
def test_other_ranks_have_every_value(
    tmp_path: Path, saved: Callable[[int], Path], savers: int, loaders: int, loaded: str
) -> None:
    folder, sources = saved(savers), SAVED[savers]
    require_success(run(loaders, tmp_path / "loaded", "load", str(folder), sources, loaded))
    for source, case in zip(sources.split(","), loaded.split(","), strict=True):
        expected = load_file(folder / f"{source}.saved.safetensors")
        state = load_file(tmp_path / "loaded" / f"{source}.to.{case}.safetensors")
        scale, loaded_scale = expected.pop("losses")[-1], state.pop("losses")[-1]
        assert scale == loaded_scale or source[:4] != case[:4]  # Only FP16 has one.
        require_values(expected, state)
        require_next_steps(folder / source, tmp_path / "loaded", case, loaders)


def require_next_steps(checkpoint: Path, folder: Path, case: str, world_size: int) -> None:
    """The next steps of the processes are those of the reference semantics with the same checkpoint."""
    precision, stage, *replicas = case.split(".")
    logical = mlp(dim=40, precision=precision, clip=0.5, ema=0.9, micro_steps=2)
    lockstep = Lockstep(lowered(logical, int(stage), world_size, *map(int, replicas)))
    lockstep.load(str(checkpoint))
    after = load_file(folder / f"{checkpoint.name}.to.{case}.after.safetensors")
    steps = random_batches(2, world_size, micro_steps=2, seed=5)
    losses = [float(lockstep.step(ranks)[0].loss) for ranks in steps]
    assert after["losses"].tolist()[:-1] == losses
    for (flat, quantity), values in lockstep.full_state().items():
        assert torch.equal(after[f"{flat}/{quantity}"], values)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, "fp16.3"),
        pytest.param(3, SAVED[3], marks=pytest.mark.slow),
        pytest.param(4, SAVED[4], marks=pytest.mark.slow),
    ],
)
def test_three_resumes_are_the_uninterrupted_run(
    tmp_path: Path, saved: Callable[[int], Path], world_size: int, cases: str
) -> None:
    folder = saved(world_size)
    require_success(run(world_size, tmp_path / "resumed", "resumes", str(folder), cases))
    for case in cases.split(","):
        whole = load_file(folder / f"{case}.after.safetensors")
        whole["losses"] = whole["losses"][3:]
        require_same(load_file(tmp_path / "resumed" / f"{case}.resumed.safetensors"), whole)


@pytest.mark.slow
def test_a_step_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    cases = ("fp16.3", "fp32.0", "fp32.1", "fp32.2")
    require_success(run(2, tmp_path / "job", "within", *cases))
    for case in cases:
        whole = load_file(tmp_path / "job" / f"{case}.whole.safetensors")
        require_same(load_file(tmp_path / "job" / f"{case}.continued.safetensors"), whole)


@pytest.mark.slow
def test_a_failure_in_the_background_is_reported_at_the_next_step(tmp_path: Path) -> None:
    results = run(3, tmp_path / "job", "failing", "step")
    require_success(results)
    outputs = [out for _, out, _ in results]
    assert outputs[1] == "the disk is full"
    for rank in (0, 2):
        assert outputs[rank] == "Rank 1 could not save its part of the checkpoint: the disk is full"
    assert sorted(path.name for path in (tmp_path / "job").iterdir() if path.is_dir()) == ["next"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["close", "exit"])
def test_a_failure_in_the_background_is_an_error_at_the_end(tmp_path: Path, where: str) -> None:
    """``exit`` ends the process without closing the engine."""
    for code, _, err in run(2, tmp_path / "job", "failing", where):
        assert code == 2
        assert "the disk is full" in err


@pytest.mark.slow
def test_a_rank_that_ends_while_it_saves_ends_the_save(tmp_path: Path) -> None:
    results = run(3, tmp_path / "job", "lost")
    assert [code for code, _, _ in results] == [2, 9, 2]
    for rank in (0, 2):
        assert "lost its peers" in results[rank][2]
    assert not (tmp_path / "job" / "half").exists()


_MEGABYTE = 1 << 20


@pytest.mark.slow
def test_a_load_takes_little_memory_beside_the_buffers(tmp_path: Path) -> None:
    """800 MB of state, saved by two ranks and loaded by one or three, also with another precision."""
    require_success(run(2, tmp_path / "saved", "save-large"))
    for world_size, precision in ((1, "fp32"), (3, "bf16")):
        results = run(world_size, tmp_path / f"loaded{world_size}", "load-large", precision)
        require_success(results)
        for _, out, _ in results:
            raised, persistent = map(int, out.split())
            assert raised - persistent <= 256 * _MEGABYTE
