"""Programs on disk are those that would be lowered, whatever else is in their folder."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from tests.api.small_net import BATCH, Net
from tests.support.programs import mlp
from tests.support.zygote import DEADLINE_S, Forked, compiling_zygote
from zeroir import artifact as artifacts
from zeroir.api import CompiledProgram, kept_programs
from zeroir.api.compiling import compile_with
from zeroir.api.lowering import lower
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.ir.text import print_program
from zeroir.passes import manager
from zeroir.passes.memory.plan_memory import PlanMemory

ROOT = Path(__file__).parents[2]
OPTIONS = (
    {"stage": 0},
    {"stage": 3, "world_size": 4, "precision": "fp16", "clip": 1.0},
    {"stage": 2, "world_size": 2, "micro_steps": 2, "offload": "optimizer"},
    {"stage": 3, "world_size": 2, "micro_steps": 4, "order": "layer=2", "recompute": "*"},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the programs that the test keeps."""
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ZEROIR_KEEP_PROGRAMS", "on")
    return tmp_path / "cache" / "programs"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the outlines of the programs that passes were run on."""
    made: list[str] = []
    prove = manager.prove

    def noted(program: Program, *others: object) -> object:
        made.append(program.outline)
        return prove(program, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(manager, "prove", noted)
    return made


def logical(**values: object) -> Program:
    options = make_options({"stage": 1, "world_size": 4, **values})
    return replace(mlp(blocks=1), options=options)


def lowered(**values: object) -> str:
    """Return the text of a small program that is lowered, and kept."""
    return print_program(lower(logical(**values), is_kept=True).proof.program)


def test_a_program_with_the_weights_of_another_module_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_programs, "MOST_CONSTANTS_BYTES", 100)
    for outside in (torch.ones(25), torch.ones(26)):
        zeroir.compile(Net(), BATCH, loss=lambda net, batch, x=outside: net(*batch) + x.sum())
    assert len(list(folder.iterdir())) == 1


def compiled(values: dict[str, object]) -> CompiledProgram:
    model = ROOT / "examples" / "gpt.py"
    return compile_with(str(model), make_options(values))


@pytest.mark.slow
@pytest.mark.parametrize("values", OPTIONS)
def test_kept_programs_are_those_that_are_lowered(
    values: dict[str, object], folder: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROIR_KEEP_PROGRAMS", "off")
    plain = compiled(values)
    assert not folder.exists()
    monkeypatch.setenv("ZEROIR_KEEP_PROGRAMS", "on")
    first, second = (compiled(values) for _ in range(2))
    assert len(runs) == 2
    for each in (first, second):
        assert artifacts.to_bytes(each.artifact) == artifacts.to_bytes(plain.artifact)
        assert each.text() == plain.text()
        assert each.report.laws == plain.report.laws
        assert each.options == plain.options
    assert second.specialise(world_size=3).text() == plain.specialise(world_size=3).text()


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_program_of_many_shapes_is_kept(runs: list[str]) -> None:
    texts = [
        zeroir.compile(Net(), BATCH, shapes=((Dim("rows", min=2, max=8), 8),), world_size=2).text()
        for _ in range(2)
    ]
    assert len(runs) == 1
    assert texts[0] == texts[1]
    assert "dim rows" in texts[0]


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore:.* the sizes of the batch decide")
def test_the_next_engine_finds_what_an_engine_compiled_for_other_sizes(
    runs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.is_bounded = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.line(x * 2 if x.shape[0] > 5 else x)
            return (y.tanh() if self.is_bounded else y).square().mean()

    def losses() -> list[float]:
        torch.manual_seed(0)
        net = Doubling()
        shapes = (Dim("rows", max=8), 4)
        compiled = zeroir.compile(net, torch.zeros(3, 4), shapes=shapes, world_size=1)
        engine = compiled.engine(self_check=False)
        made = [engine.step(torch.ones(rows, 4)).loss for rows in (3, 7, 5)]
        net.is_bounded = True
        made.append(engine.step(torch.ones(3, 4)).loss)
        engine.close()
        return made

    first = losses()
    assert len(runs) == 3
    assert losses() == first
    assert len(runs) == 3
    assert sum("was compiled in" in record.getMessage() for record in caplog.records) == 2


def test_whatever_lowering_reads_makes_another_key(folder: Path, runs: list[str]) -> None:
    kept = [lowered(), lowered(stage=2), lowered(lr=0.5), lowered(clip=1.0)]
    assert len(set(kept)) == len(kept) == len(runs) == len(list(folder.iterdir()))
    assert [lowered(), lowered(stage=2), lowered(lr=0.5), lowered(clip=1.0)] == kept
    assert len(runs) == len(kept)
    assert print_program(lower(logical(stage=2)).proof.program) == kept[1]
    program = logical()
    assert kept_programs.key_of(program, ()) != kept_programs.key_of(program, (PlanMemory(),))


@pytest.mark.slow
def test_the_code_that_lowers_is_a_part_of_the_key() -> None:
    """Every module that a process imports to lower a program is among the files that are hashed."""
    script = (
        "import json, sys\n"
        "from zeroir import artifact\n"
        "before = set(sys.modules)\n"
        "from zeroir.passes.manager import prove\n"
        "from zeroir.passes.pipelines import for_options\n"
        "from zeroir.config import options_of\n"
        "program = artifact.load(sys.argv[1]).logical\n"
        "prove(program, for_options(options_of(program)))\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'zeroir']\n"
        "print(json.dumps(files))\n"
    )
    program = ROOT / "tests" / "data" / "schema_3_4.zir"
    run = subprocess.run(
        [sys.executable, "-c", script, str(program)], check=True, stdout=subprocess.PIPE, cwd=ROOT
    )
    imported = {Path(file).resolve() for file in json.loads(run.stdout)}
    assert imported <= {file.resolve() for file in kept_programs.lowering_files()}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def of_another(file: Path) -> None:
    """Put another program there, which is whole."""
    lowered(stage=2)
    (other,) = set(file.parent.iterdir()) - {file}
    other.replace(file)


def not_lowered(file: Path) -> None:
    """Put a program of the same model there that breaks a law."""
    kept = artifacts.load(file)
    section = kept.scheduled.sections[0]
    broken = replace(section, body=section.body[:-1])
    scheduled = replace(kept.scheduled, sections=(broken, *kept.scheduled.sections[1:]))
    artifacts.save(replace(kept, scheduled=scheduled), file)


@pytest.mark.parametrize("damage", [cut, flipped, emptied, of_another, not_lowered])
def test_a_damaged_program_is_made_again(
    damage: Callable[[Path], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = lowered()
    (file,) = folder.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING, "zeroir"):
        assert lowered() == text
        (record,) = caplog.records
        assert record.getMessage().startswith("A kept program is made again")
        assert lowered() == text
    assert len(caplog.records) == 1
    assert print_program(artifacts.load(file).scheduled) == text


def test_the_oldest_programs_are_removed_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered()
    (first,) = folder.iterdir()
    others = [folder / "notes.txt", folder / "gpt.zir", folder / f".{'0' * 64}.zir.{'1' * 12}.tmp"]
    for number, file in enumerate(others):
        file.write_bytes(b"x" * (1 << 20))
        os.utime(file, (number, number))
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 5 * first.stat().st_size // 2)
    lowered(stage=2)
    assert all(map(Path.exists, (first, *others[:2])))
    assert not others[2].exists()
    for file in set(folder.iterdir()) - {first, *others}:
        os.utime(file, (1, 1))
    lowered()  # which is used, and so newer than that of stage 2
    lowered(stage=3)
    kept = {file for file in folder.iterdir() if file not in others}
    assert len(kept) == 2
    assert first in kept


def test_without_a_writable_folder_programs_are_lowered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lowered()
    occupied = folder.parent / "file"
    occupied.write_text("")
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(occupied))
    assert lowered() == text


@pytest.mark.usefixtures("folder")
def test_the_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROIR_KEEP_PROGRAMS", "0")
    with pytest.raises(UserError, match="ZEROIR_KEEP_PROGRAMS is '0': set it to on or off"):
        lowered()


LOWERING = """
import sys
from tests.api.test_kept_programs import lowered
print(lowered(**{"stage": int(sys.argv[1])}))
"""


@pytest.mark.slow
@pytest.mark.dist
def test_processes_share_a_folder_and_may_be_killed(folder: Path) -> None:
    """Some are killed while they lower or write; the others, and those that come later, have the right text."""
    expected = lowered(stage=3)
    for file in folder.iterdir():
        file.unlink()
    script = folder.parent / "lowering.py"
    script.write_text(LOWERING)
    processes = [
        Forked(
            compiling_zygote(), str(script), ("3",), {}, folder.parent / f"{number}", folder=ROOT
        )
        for number in range(4)
    ]
    while not any(folder.iterdir()):
        time.sleep(0.001)
    processes[0].send_signal(signal.SIGKILL)
    for process in processes[1:]:
        assert process.wait(time.monotonic() + DEADLINE_S) == 0, process.output()
        assert process.output()[0].strip() == expected.strip()
    processes[0].wait(time.monotonic() + DEADLINE_S)
    assert lowered(stage=3) == expected
    assert sum(file.suffix == ".zir" for file in folder.iterdir()) == 1
