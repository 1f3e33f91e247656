"""Side effects of a model's code: a program has them, too, or a warning or an error names them."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import zeroir
from tests.support.zygote import run_forked
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import ModelWarning, UserError
from zeroir.frontend.capture.python_state import PythonState, UsersCode

MODEL = """
import itertools
import random
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CALLS = 0

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return torch.relu(self.down(torch.tanh(self.up(x)))) + x

class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

class Model(nn.Module):
    count = 0

    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.post = nn.Linear(8, 8)
        self.calls, self.is_first, self.kept, self.notes, self.facts = 0, True, None, [], {"calls": 1}
        self.numbers, self.items, self.slots = itertools.count(), (i for i in range(99)), Slots()
        {init}

    def run(self, x):
        {run}
        return x

    {decorator}
    def forward(self, x):
        global CALLS
        x = self.run(self.pre(x))
        {forward}
        return self.post(x).square().mean()

def model():
    return Model()

def batch():
    return (torch.randn(4, 8),)
"""
PARTS = {
    "init": "pass",
    "run": "for block in self.blocks: x = block(x)",
    "decorator": "",
    "forward": "pass",
}


def write(folder: Path, **parts: str) -> str:
    text = MODEL
    for name, part in (PARTS | parts).items():
        text = text.replace(f"{{{name}}}", part)
    path = folder / "model.py"
    path.write_text(text)
    return str(path)


def warned(path: str, stage: int = 2) -> list[str]:
    """The warnings of checking a model whose losses and parameters equal the reference's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comparison = check_model(
            path, make_options({"stage": stage, "world_size": 2}), steps=2, seed=0
        )
    assert comparison.is_equal, str(comparison)
    return [str(each.message) for each in caught if issubclass(each.category, ModelWarning)]


HONOURED = {
    "gradient of a parameter": "self.pre.weight.register_hook(lambda gradient: gradient * 0.1)",
    "gradients of a block": "self.blocks[2].up.bias.register_hook(lambda gradient: gradient + 1)",
    "gradient in place": "self.pre.bias.register_hook(lambda gradient: (gradient.mul_(3), None)[1])",
    "gradients of a module": (
        "self.blocks[1].register_full_backward_hook(lambda _, given, __: (given[0] * 3,))"
    ),
    "columns": (
        "w = torch.randn(8, 16); self.pre.weight, self.post.weight = "
        "nn.Parameter(w[:, :8]), nn.Parameter(w[:, 8:])"
    ),
    "a buffer that nobody reads": "self.register_buffer('copy', self.pre.weight.data)",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HONOURED)
def test_a_supported_side_effect_is_kept(what: str, tmp_path: Path) -> None:
    assert warned(write(tmp_path, init=HONOURED[what])) == []


def test_a_hook_of_a_parameter_with_two_names_is_refused(tmp_path: Path) -> None:
    init = "self.post.weight = self.pre.weight; self.pre.weight.register_hook(lambda g: g)"
    sentence = r"pre\.weight of the model has a hook of register_hook and is post\.weight as well"
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(write(tmp_path, init=init), world_size=1)


@pytest.mark.slow
def test_a_buffer_in_the_memory_of_a_parameter_is_refused_where_it_is_read(tmp_path: Path) -> None:
    init, forward = "self.register_buffer('view', self.pre.weight.data[:1])", "x = x * self.view"
    sentence = r"pre\.weight and view of the model share memory, and training changes pre\.weight"
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(write(tmp_path, init=init, forward=forward), world_size=1)


CHANGED = {
    "self.calls += 1; x = x * self.calls": "calls",
    "x = x * 3 if self.is_first else x; self.is_first = False": "is_first",
    "self.facts['calls'] += 1; x = x * self.facts['calls']": r"facts\['calls'\]",
    "self.notes.append(x.shape); x = x / len(self.notes)": "notes",
    "Model.count += 1; x = x + Model.count": r"Model\.count",
    "CALLS += 1; x = x + CALLS": r"model\.py:CALLS",
    "x = x * random.random()": "the state of Python's random",
    "x = x * (1 + next(self.numbers))": "numbers",
    "x = x * (1 + next(self.items))": "items",
    "x = x if self.kept is None else x + self.kept; self.kept = x.detach()": "kept",
}


@pytest.mark.slow
@pytest.mark.parametrize("forward", CHANGED)
def test_state_that_the_next_forward_depends_on_is_refused(forward: str, tmp_path: Path) -> None:
    sentence = f"forward changes {CHANGED[forward]} and computes something else at its next call"
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(write(tmp_path, forward=forward), world_size=1)


SAID = {
    "self.calls += 1": r"forward changes calls at every call, and the program does not",
    "self.kept = torch.arange(8.) if self.kept is None else self.kept; x = x + self.kept": (
        r"forward keeps kept at its first call for later ones"
    ),
    "self.seen = x.detach()": r"forward stores seen, and the program",
    "self.facts['seen'] = x.detach()": r"forward stores facts\['seen'\], and the program",
    "self.notes.append(x.detach())": r"forward stores notes, and the program",
    "self.is_first = False": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("forward", SAID)
def test_state_that_changes_no_value_gives_at_most_a_warning(forward: str, tmp_path: Path) -> None:
    sentences, expected = warned(write(tmp_path, forward=forward)), SAID[forward]
    assert len(sentences) == (expected is not None)
    assert expected is None or re.search(expected, sentences[0])


KEPT = {
    "self.notes.append(1)": "notes",
    "self.facts['calls'] += 1": r"facts\['calls'\]",
    "Model.count += 1": r"Model\.count",
    "CALLS += 1": r"model\.py:CALLS",
    "random.random()": "the state of Python's random",
    "self.calls += 1; x = x * (2 if self.calls > 100 else 1)": "calls",
    "self.calls += 1; x = x * (1 + self.calls // 1000)": "calls",
    "self.calls += 1; x = x * self.facts.get(self.calls, 1)": "calls",
    "self.calls = (self.calls + 1) ** 2": "calls",
    "next(self.numbers)": "numbers",
    "next(self.items)": "items",
    "self.slots.count += 1": r"slots\.count",
}


@pytest.mark.slow
@pytest.mark.parametrize("forward", KEPT)
def test_state_that_a_later_forward_or_the_user_may_read_is_refused(
    forward: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"forward changes {KEPT[forward]} at every call"):
        zeroir.compile(write(tmp_path, forward=forward), world_size=1)


CALLS_OF_CHECKPOINT = (
    "checkpoint(block, x, use_reentrant=False)",
    "checkpoint(block, x, use_reentrant=True)",
)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS_OF_CHECKPOINT)
def test_units_under_a_checkpoint_are_recomputed(call: str, tmp_path: Path) -> None:
    run = f"for at, block in enumerate(self.blocks): x = {call} if at % 2 else block(x)"
    path = write(tmp_path, run=run)
    assert warned(path) == []
    marked = zeroir.compile(path, world_size=1)
    asked = zeroir.compile(write(tmp_path), world_size=1, recompute=("blocks.1", "blocks.3"))
    assert marked.options.recompute.units == ("blocks.1", "blocks.3")
    assert marked.program.passes == asked.program.passes
    assert zeroir.compile(path, world_size=1, recompute="blocks.0").options.recompute.units == (
        "blocks.0",
    )


@pytest.mark.slow
def test_a_checkpoint_of_less_than_a_unit_gives_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path, forward="x = checkpoint(self.post, x, use_reentrant=False)")
    (sentence,) = warned(path)
    assert re.match(r"model\.py:45 checkpoints less than a unit", sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        {"forward": "with torch.autocast('cuda', dtype=torch.bfloat16): x = self.post(x)"},
        {"decorator": "@torch.autocast('cuda')"},
        {"decorator": "@torch.amp.autocast('cuda', dtype=torch.bfloat16)"},
    ],
)
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_autocast_for_an_accelerator_gives_a_warning(parts: dict[str, str], tmp_path: Path) -> None:
    with pytest.warns(ModelWarning, match=r"model\.py:4\d asks for torch.autocast\('cuda'\)"):
        zeroir.compile(write(tmp_path, **parts), world_size=1)


@pytest.mark.slow
def test_a_command_prints_the_warning_as_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, forward="self.calls += 1")
    process = run_forked("zeroir", ["compile", "model.py", "--world-size", "1"], tmp_path)
    assert process.returncode == 0
    assert process.stderr == (
        "Warning: The model's forward changes calls at every call, and the program does not; no computation depends on "
        "it.\n"
    )


@pytest.mark.slow
def test_disabled_autocast_gives_no_warning(tmp_path: Path) -> None:
    forward = "with torch.autocast('cuda', enabled=False): x = self.post(x)"
    assert warned(write(tmp_path, forward=forward)) == []


@pytest.mark.slow
def test_a_hook_that_changes_nothing_gives_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path, init="self.pre.weight.register_hook(lambda gradient: None)")
    with pytest.warns(ModelWarning, match=r"hook on the gradient of pre\.weight leaves"):
        zeroir.compile(path, world_size=1)


class _Lazy(dict[str, object]):
    """It makes its items on demand, as mappings of libraries that import modules do."""

    def __iter__(self) -> Iterator[str]:
        return iter(["made on demand"])

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, key: str) -> object:
        raise ImportError(f"no module named {key}")


class _LazyAndOrdered(OrderedDict[str, object]):
    __iter__, __len__, __getitem__ = _Lazy.__iter__, _Lazy.__len__, _Lazy.__getitem__


@pytest.mark.parametrize("kind", [_Lazy, _LazyAndOrdered])
def test_of_a_mapping_that_makes_its_items_only_what_it_stores_is_state(
    kind: type[_Lazy] | type[_LazyAndOrdered],
) -> None:
    model = nn.Module()
    lazy = kind({"stored": 1})
    vars(model)["table"] = lazy
    code = UsersCode(modules=(), functions=())
    before = PythonState.of(model, code)
    assert before.leaves["table"] == (kind, 1)
    lazy["later"] = 2
    assert before.changed(PythonState.of(model, code)) == ["table"]
    before.restore_exactly()
    assert PythonState.of(model, code).leaves == before.leaves
