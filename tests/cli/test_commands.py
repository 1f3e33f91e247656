"""Each command as a user meets it: its answer, its JSON, its exit code."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zeroir as package
from tests.cli.conftest import GPT, Zeroir, assert_refused
from tests.support.stored_program import STORED
from zeroir import artifact
from zeroir.cli.app import app, run_command
from zeroir.ir.ops import Release
from zeroir.ir.text import parse
from zeroir.verify.laws import CODES

FACTS = {
    "stage",
    "world_size",
    "precision",
    "parameters_numel",
    "units",
    "ops",
    "sections",
    "distinct_segments",
    "collective_bytes",
    "model_state_bytes_per_rank",
    "laws",
}


def test_compile_prints_the_program(programs: dict[int, Path]) -> None:
    facts = json.loads(programs[3].with_suffix(".json").read_text())
    assert facts.keys() >= FACTS
    assert facts["parameters_numel"] == 834_304
    assert facts["units"] == ["root.pre", *(f"blocks.{i}" for i in range(4)), "root.post"]
    assert facts["distinct_segments"] == 6
    assert facts["bounds"] == ["full_parameters ahead=0", "full_gradients ahead=1"]
    assert set(facts["laws"].values()) == {"proved"}
    assert facts["collective_bytes"].keys() == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "broadcast",
        "scalar",
    }


def test_the_collector_of_garbage_skips_objects_from_before_a_compilation(
    zeroir: Zeroir, tmp_path: Path
) -> None:
    """Those of torch are a million, which would be looked at again and again."""
    path = tmp_path / "model.py"
    path.write_text(
        "import gc, torch\n"
        "def model():\n"
        "    assert gc.get_freeze_count() > 0\n"
        "    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))\n"
        "def batch():\n"
        "    return torch.zeros(1, 2)\n"
    )
    assert zeroir("compile", path, "-o", tmp_path / "a.zir").exit_code == 0
    assert gc.get_freeze_count() == 0


def test_a_pipe_gets_one_row_a_line(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    program = package.load(programs[3])
    lines = zeroir("show", programs[3]).out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    at = lines.index("last_micro_step") + 2
    stop = lines.index("", at)
    for line in lines[at:stop]:
        number = line.split()[0]
        assert number == "⋮" or int(number) < len(program.program.sections[0].body)
    assert str(program) == "\n".join(lines)


@pytest.mark.slow
def test_every_command_helps_with_an_example(zeroir: Zeroir) -> None:
    for command in ("compile", "show", "diff", "verify", "explain", "check", "run"):
        answer = zeroir(command, "--help")
        assert answer.exit_code == 0
        assert "Example: " in answer.out
        assert "--json" in answer.out
        assert "None" not in answer.out


def test_show_folds_equal_blocks(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    answer = zeroir("show", programs[3])
    assert answer.exit_code == 0
    assert "the same" in answer.out
    assert "blocks.0" in answer.out
    assert "prefetch" in answer.out
    facts = zeroir("show", programs[3], "--json").json
    assert facts.keys() >= FACTS | {"schedule"}
    ops = [row["op"] for row in facts["schedule"]["last_micro_step"]]
    assert ops.count("reduce_scatter") == 6


def test_show_one_unit_and_one_section(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    chosen = ["--unit", "blocks.1", "--section", "last_micro_step"]
    facts = zeroir("show", programs[3], *chosen, "--json").json
    assert list(facts["schedule"]) == ["last_micro_step"]
    assert all(row["units"] == ["blocks.1"] for row in facts["schedule"]["last_micro_step"])


@pytest.mark.slow
def test_shown_text_is_the_program(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    text = zeroir("show", programs[3], "--text").out
    assert parse(text) == package.load(programs[3]).program
    section = zeroir("show", programs[3], "--text", "--section", "update").out
    assert section.startswith("section update {")
    assert f"\n{section}" in text


def test_diff_tells_stages_apart(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    answer = zeroir("diff", programs[2], programs[3])
    assert answer.exit_code == 0
    assert "+" in answer.out
    assert "prefetch" in answer.out
    assert answer.out.startswith(f"--- {programs[2]}\n+++ {programs[3]}\n")
    only_counts = zeroir("diff", programs[2], programs[3], "--stat", "--exit-code")
    assert only_counts.exit_code == 1
    assert answer.out.endswith(only_counts.out)
    equal = zeroir("diff", programs[3], programs[3], "--exit-code")
    assert equal.exit_code == 0
    assert equal.out == f"{programs[3]} and {programs[3]} hold equal programs.\n"
    assert zeroir("diff", programs[3], programs[3], "--json").json["is_equal"]


def test_verify_names_the_broken_law(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    assert zeroir("verify", programs[3]).exit_code == 0
    whole = artifact.load(programs[3])
    section = whole.scheduled.sections[0]
    at = next(i for i, op in enumerate(section.body) if isinstance(op, Release))
    leaking = replace(section, body=section.body[:at] + section.body[at + 1 :])
    broken = replace(whole.scheduled, sections=(leaking, *whole.scheduled.sections[1:]))
    artifact.save(replace(whole, scheduled=broken), tmp_path / "broken.zir")
    answer = zeroir("verify", tmp_path / "broken.zir")
    assert answer.exit_code == 1
    assert "Z104" in answer.out
    facts = zeroir("verify", tmp_path / "broken.zir", "--json").json
    assert not facts["is_valid"]
    assert facts["laws"]["Z104"] != "proved"
    assert_refused(zeroir("show", tmp_path / "broken.zir"), "Z104")


def test_a_budget_is_proved_where_it_is_given(zeroir: Zeroir) -> None:
    enough = zeroir("verify", STORED, "--budget", "80GB", "--json")
    assert enough.json["laws"]["Z301"] == "proved"
    too_little = zeroir("verify", STORED, "--memory-budget", "1 kB")
    assert too_little.exit_code == 1
    table, _, below = too_little.out.partition("\n\n")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert [line.split()[-1] for line in table.splitlines() if line.startswith("Z301")] == [
        "broken"
    ]
    assert "the budget is 1,000" in " ".join(below.split())


def test_a_report_names_the_errors_that_laws_rule_out(
    zeroir: Zeroir, programs: dict[int, Path]
) -> None:
    lines = zeroir("verify", programs[3]).out.splitlines()
    laws = package.load(programs[3]).report.laws
    for line, (code, verdict) in zip(lines[1:], laws.items(), strict=True):
        assert line.split("  ")[0] == code
        assert CODES[code].title in line
        assert line.endswith(verdict)


def test_laws_are_listed(zeroir: Zeroir) -> None:
    assert [line.split()[0] for line in zeroir("explain").out.splitlines()] == list(CODES)
    assert [law["code"] for law in zeroir("explain", "--json").json["laws"]] == list(CODES)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_law_is_explained(zeroir: Zeroir, code: str) -> None:
    answer = zeroir("explain", code.lower())
    assert answer.exit_code == 0
    assert code in answer.out
    assert zeroir("explain", code, "--json").json["code"] == code


@pytest.mark.slow
def test_check_compares_with_eager(zeroir: Zeroir) -> None:
    answer = zeroir("check", GPT, "--stage", "3", "--world-size", "4", "--steps", "2", "--json")
    assert answer.exit_code == 0, answer.err
    assert answer.json["is_equal"]
    assert answer.json["tolerance"] == 0


CALLING = """
import os

import torch
from torch import nn

def calls():
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return int(os.environ["CALLS"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    def forward(self, x):
{forward}

def model():
    return Net()

def batch():
    return (torch.ones(2, 4),)
"""
FICKLE, COUNTER, DIVERGING = (
    CALLING.replace("{forward}", f"        {forward}")
    for forward in (
        "return self.line(x).square().mean() * calls()",
        "self.seen.add_(calls()); return self.line(x).square().mean()",
        "return -(self.line(x) + self.mask[0]).exp().sum()",
    )
)


def test_check_finds_effects_that_the_trace_cannot_see(zeroir: Zeroir, tmp_path: Path) -> None:
    """The environment is no state that a capture looks at, so tracing freezes what forward reads there."""
    (tmp_path / "fickle.py").write_text(FICKLE)
    answer = zeroir("check", tmp_path / "fickle.py", "--world-size", "3")
    assert answer.exit_code == 1
    assert "the loss of rank" in answer.out
    facts = zeroir("check", tmp_path / "fickle.py", "--world-size", "3", "--json").json
    assert not facts["is_equal"]
    assert facts["differences"][0]["step"] == 1


def test_check_compares_module_buffers(zeroir: Zeroir, tmp_path: Path) -> None:
    """Losses and parameters are right here; only a running statistic is not."""
    (tmp_path / "counter.py").write_text(COUNTER)
    answer = zeroir("check", tmp_path / "counter.py", "--world-size", "2", "--json")
    assert answer.exit_code == 1
    named = [difference["what"] for difference in answer.json["differences"]]
    assert named == [f"seen of rank {rank} at element 0" for rank in range(2)]


@pytest.mark.slow
def test_check_never_finds_nan_equal(zeroir: Zeroir, tmp_path: Path) -> None:
    """A mask may be infinite, a loss or a parameter may not: NaN on both sides would prove nothing."""
    model = tmp_path / "diverging.py"
    model.write_text(DIVERGING)
    options = ("--world-size", "2", "--optimizer", "sgd", "--steps", "4")
    assert zeroir("check", model, *options, "--lr", "0.001").exit_code == 0
    answer = zeroir("check", model, *options, "--lr", "1e30")
    assert answer.exit_code == 1
    _, *lines, traced = answer.out.splitlines()
    assert traced == "Traced: root."
    assert len(lines) == 2  # for each rank, and nothing of the steps and parameters after it
    for rank, line in enumerate(lines):
        assert re.match(
            rf"  step \d: the loss of rank {rank} is (-inf|nan) in eager PyTorch itself, so", line
        ), line
    answer = zeroir("check", model, *options[:-1], "1", "--lr", "3e38")
    assert answer.exit_code == 1
    assert re.search(r"line.bias at element . is (inf|nan) in eager PyTorch itself", answer.out)


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of the model that counts."""
    model = tmp_path_factory.mktemp("counter") / "counter.py"
    model.write_text(COUNTER)
    program = model.with_suffix(".zir")
    assert run_command(["compile", str(model), "-o", str(program)]) == 0
    return program


def test_run_trains_alone(counter: Path) -> None:
    """Without torchrun there is one rank, for which the program is lowered again."""
    compiled = package.load(counter)
    engine = compiled.engine(seed=0)
    first, second = (engine.step((torch.ones(2, 4),)).loss for _ in range(2))
    engine.close()
    assert second < first
    assert "stage 3" in str(compiled)


@pytest.mark.parametrize("command", ["compile", "check"])
def test_what_a_model_file_prints_does_not_spoil_the_json(
    zeroir: Zeroir, tmp_path: Path, command: str
) -> None:
    model = tmp_path / "counter.py"
    model.write_text(
        COUNTER.replace("def model():", "print('loaded')\ndef model():\n    print('built')")
    )
    written = ("-o", tmp_path / "counter.zir") if command == "compile" else ("--steps", "1")
    answer = zeroir(command, model, "--world-size", "2", *written, "--json")
    assert answer.exit_code == (1 if command == "check" else 0), answer.err  # its buffers differ
    assert answer.json
    assert {"loaded", "built"} <= set(answer.err.split())


def test_ranks_get_the_command_that_was_given(
    zeroir: Zeroir, programs: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, list[str]]] = []

    def launch(nproc: int, arguments: list[str]) -> int:
        launched.append((nproc, arguments))
        return 7

    monkeypatch.setattr("zeroir.api.running.job.launch", launch)
    given = ["run", str(programs[3]), "--steps", "5", "--seed", "2", "--log-every", "3"]
    given += ["--eval-every", "4", "--save", "runs", "--save-every", "4", "--keep", "3"]
    given += ["--keep-best", "eval_loss", "--resume", "none"]
    given += ["--model", "gpt.py", "--kernels", "inductor", "--timeout", "60"]
    given += ["--allow-model-change", "--cuda-graphs", "--no-self-check", "--json"]
    answer = zeroir(*given, "--nproc", "2")
    assert answer.exit_code == 7
    ((nproc, arguments),) = launched
    assert nproc == 2
    (as_given, as_launched) = (
        app.parse_args(each, exit_on_error=False)[1] for each in (given, arguments)
    )
    assert as_launched.arguments == as_given.arguments


def test_graphs_without_a_gpu_are_a_sentence_and_no_failure(zeroir: Zeroir, counter: Path) -> None:
    answer = zeroir("run", counter, "--steps", "1", "--cuda-graphs")
    assert answer.exit_code == 0
    assert "Warning: There are no CUDA graphs on the device cpu" in answer.err
