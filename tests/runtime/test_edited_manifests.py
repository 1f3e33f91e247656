"""Whatever value of a manifest somebody replaces, a load gives what it says, or refuses it and changes nothing.

The checksum is made anew, so that it does not refuse the edit.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroir
from tests.runtime.support import require_equal
from tests.support.checkpoint_files import signed_manifest
from tests.support.examples import examples
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

Tree: TypeAlias = Any
"""Whatever JSON has."""
Place = tuple[str | int, ...]

pytestmark = pytest.mark.filterwarnings("ignore::zeroir.errors.CheckpointWarning")

BATCH: Final = (torch.linspace(-1, 1, 32).reshape(4, 8),)


class Net(nn.Module):
    """Tied weights, a frozen parameter, running statistics, and a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.decode = nn.Linear(8, 8, bias=False)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.ones(8))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.encode(x)))
        loss: Tensor = (self.decode(hidden) * self.scale + self.shift).square().mean()
        return loss


def nested(depth: int) -> Tree:
    tree: Tree = []
    for _ in range(depth):
        tree = [tree]
    return tree


REPLACEMENTS: Final[tuple[Tree, ...]] = (
    *(None, True, False, -1, 0, 1, 2, 65, 2**63, 2**70, -(2**70), 0.5, 1e308),
    *("", "abc", "x\0y", "5", "Infinity", "NaN", "f16", "u16", "exp_avg_codes", "__metadata__"),
    *([], [1], [-1], ["a"], [[1, 2]], {}, {"a": 1}, nested(150), nested(260)),
    {"$": "array", "kind": "torch", "dtype": "u8", "shape": [2, -1, -1], "tensor": "state.0"},
    *({"$": "int", "hex": "zz"}, {"$": "dict", "items": [[[1], 2]]}, {"$": "float", "hex": "00"}),
)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """An engine, the manifest of a checkpoint that it has gone on from, and a copy of this checkpoint to edit."""

    engine: Engine
    manifest: dict[str, Tree]
    path: Path


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    compiled = zeroir.compile(
        Net(), *BATCH, loss=lambda net, x: net(x), precision="fp16", ema=0.9, micro_steps=2
    )
    engine = compiled.engine(self_check=False)
    engine.step([BATCH, BATCH])
    if request.param == "within a step":
        engine.micro_step(BATCH, is_last=False)
    state = {"order": torch.arange(5), "position": (1, 2.5, float("inf")), "bytes": b"abc"}
    engine.save(folder / "whole", shared={"seen": torch.ones(3)}, state=state)
    shutil.copytree(folder / "whole", folder / "edited")
    if request.param == "within a step":
        engine.micro_step(BATCH, is_last=True)
        engine.update()
    engine.step([BATCH, BATCH])
    document = json.loads((folder / "whole" / "manifest.json").read_bytes())
    return Saved(engine=engine, manifest=document["manifest"], path=folder / "edited")


def places(tree: Tree, place: Place = ()) -> Iterator[Place]:
    """The places of all values in a tree, but for the tree itself."""
    inner: list[tuple[str | int, Tree]] = []
    if isinstance(tree, dict):
        inner = [*tree.items()]
    elif isinstance(tree, list):
        inner = [*enumerate(tree)]
    for key, value in inner:
        yield (*place, key)
        yield from places(value, (*place, key))


def at(tree: Tree, place: Place) -> Tree:
    for key in place:
        tree = tree[key]
    return tree


def edited(tree: dict[str, Tree], place: Place, change: Callable[[Tree], None]) -> dict[str, Tree]:
    """A copy in which what holds the value at a place is changed."""
    copied = copy.deepcopy(tree)
    change(at(copied, place[:-1]))
    return copied


@st.composite
def edits(draw: st.DrawFn, manifest: dict[str, Tree]) -> dict[str, Tree]:
    """A manifest with one value replaced by another one, by one from elsewhere in it, left out, or doubled."""
    every = [*places(manifest)]
    place = draw(st.sampled_from(every))
    kind = draw(st.sampled_from(["other", "other", "number", "own", "left out", "doubled"]))

    def change(holder: Tree) -> None:
        key = place[-1]
        match kind:
            case "left out":
                del holder[key]
            case "doubled" if isinstance(holder, list) and isinstance(key, int):
                holder.append(copy.deepcopy(holder[key]))
            case "number" if isinstance(holder[key], int):
                holder[key] += draw(st.sampled_from([-1, 1, 64]))
            case "own":
                holder[key] = copy.deepcopy(at(manifest, draw(st.sampled_from(every))))
            case _:
                holder[key] = draw(st.sampled_from(REPLACEMENTS))

    return edited(manifest, place, change)


def snapshot(engine: Engine) -> dict[str, object]:
    """Everything that a load may change."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    return {
        "values": {name: value.clone() for name, value in engine.full_state().items()},
        "groups": groups,
        "step": engine.step_count,
        "loss scale": engine.loss_scale,
    }


def stored_values(path: Path, quantity: str) -> dict[str, Tensor]:
    """What a manifest says of a quantity of each parameter, read as the documentation reads it."""
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    files = {file["name"]: load_file(path / file["name"]) for file in manifest["files"]}
    values = {}
    for flat in manifest["flats"]:
        for stored in (each for each in flat["quantities"] if each["name"] == quantity):
            pieces = sorted(stored["pieces"], key=lambda piece: piece["start"])
            whole = torch.cat([files[piece["file"]][piece["tensor"]] for piece in pieces])
            for parameter in flat["parameters"]:
                part = whole[parameter["offset"] :][: prod(parameter["shape"])]
                for name in (parameter["name"], *parameter.get("aliases", ())):
                    values[name] = part.view(parameter["shape"])
    return values


def require_as_the_manifest_says(engine: Engine, path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    assert engine.step_count == manifest["step"]
    masters, moments = stored_values(path, "master"), stored_values(path, "exp_avg")
    state_dict = engine.state_dict()
    for name, _ in Net().named_parameters():
        assert torch.equal(state_dict[name], masters[name])
    states = cast("Mapping[str, Mapping[str, Tensor]]", engine.optimizer_state_dict()["state"])
    for name, state in states.items():
        assert torch.equal(state["exp_avg"], moments[name])
    for group in manifest.get("groups", ()):
        for own in engine.optimizer.param_groups:
            for key, value in group["settings"].items() if own["name"] == group["name"] else ():
                assert own[key] == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "saved",
    ["between steps", pytest.param("within a step", marks=pytest.mark.slow)],
    indirect=True,
)
@examples(300)
@given(st.data())
def test_a_load_gives_what_the_manifest_says_or_changes_nothing(
    saved: Saved, data: st.DataObject
) -> None:
    (saved.path / "manifest.json").write_bytes(signed_manifest(data.draw(edits(saved.manifest))))
    before = snapshot(saved.engine)
    refusal: str | None = None
    try:
        saved.engine.load(saved.path)
    except UserError as error:
        refusal = str(error)
    if refusal is None:
        require_as_the_manifest_says(saved.engine, saved.path)
    else:
        assert "\n" not in refusal
        require_equal(before, snapshot(saved.engine))


@pytest.mark.parametrize("saved", ["between steps"], indirect=True)
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("step",), -5, "step: Input should be greater than or equal to 0"),
        (("step",), "1", "step: Input should be a valid integer"),
        (("origin", "world_size"), 0, "origin.world_size: Input should be greater than"),
        (("flats", 0, "parameters", 0, "shape"), [-8, -8], "Input should be greater than or equal"),
        (("flats", 0, "quantities", 1, "pieces"), [], "no tensor has element 0 of exp_avg"),
        (("shared",), nested(220), "recursion limit exceeded"),
        *((("groups", 0, "settings", "lr"), lr, f"is {lr!r}") for lr in ("abc", -1.0)),
        (("groups", 0, "settings", "params"), [0], "has params among its settings"),
        (("scalars", 0, "values"), [-1.0], "which no training has"),
    ],
)
def test_values_that_no_training_has_are_refused_by_name(
    saved: Saved, place: Place, value: Tree, message: str
) -> None:
    def change(holder: Tree) -> None:
        holder[place[-1]] = value

    before = snapshot(saved.engine)
    path = saved.path / "manifest.json"
    path.write_bytes(signed_manifest(edited(saved.manifest, place, change)))
    with pytest.raises(UserError) as refusal:
        saved.engine.load(saved.path)
    assert message in str(refusal.value)
    require_equal(before, snapshot(saved.engine))
