"""The modules that are units, and the flats of their parameters."""

from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.support.eager import assert_equals_eager, traced
from zeroir.errors import UserError
from zeroir.frontend.lowering.units import find_units
from zeroir.ir.program import Program

MODELS = Path(__file__).parents[1] / "support" / "models"
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def sequence(*modules: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.layers = nn.Sequential(*modules)
    return outer


def flats(program: Program) -> list[str]:
    return [flat.name for flat in program.flats]


def test_repeated_blocks_are_found_outermost_first() -> None:
    module = sequence(nn.Embedding(3, 4), Block(), Block(), nn.LayerNorm(4))
    assert find_units(module, None).labels == {"layers.1": "block", "layers.2": "block"}


def test_a_repeated_class_counts_in_every_list() -> None:
    module = nn.ModuleDict(
        {"a": sequence(Block(), Block()), "b": sequence(Block(8), nn.ReLU(), Block(4))}
    )
    names = ["a.layers.0", "a.layers.1", "b.layers.0", "b.layers.2"]
    assert list(find_units(module, None).labels) == names


def test_a_pattern_selects_called_modules_before_lists() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList([Block(), Block()])
    module.head = nn.Linear(4, 4)
    assert list(find_units(module, "*").labels) == ["blocks.0", "blocks.1", "head"]
    assert list(find_units(module, "blocks").labels) == ["blocks"]
    assert list(find_units(module, "head, class:Block").labels) == ["blocks.0", "blocks.1", "head"]


def test_without_repetition_there_are_no_units() -> None:
    module = sequence(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
    assert find_units(module, None).labels == {}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("layers.[12]", ["layers.1", "layers.2"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("class:Block", ["layers.1", "layers.2"]),
        ("class:Linear", [f"layers.{i}.inner.{j}" for i in (1, 2) for j in (0, 2)]),
        ("min:20", [f"layers.{i}.inner.{j}" for i in (1, 2) for j in (0, 2)]),
        ("min:21", ["layers.1.inner", "layers.2.inner"]),
        ("min:50", ["layers"]),
        ("min:1000", []),
    ],
)
def test_units_by_pattern_class_and_size(spec: str, names: list[str]) -> None:
    module = sequence(nn.Embedding(3, 4), Block(), Block(), nn.LayerNorm(4))
    assert list(find_units(module, spec).labels) == names


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("encoder.*", "--units encoder.* matches no module with parameters; names look like"),
        ("class:Blok", "--units class:Blok matches no module with parameters; the model has Block"),
        ("min:many", "--units min:many needs a positive number"),
        ("min:0", "--units min:0 needs a positive number"),
    ],
)
def test_wrong_units_get_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        find_units(sequence(Block(), Block()), spec)
    assert str(caught.value).startswith(sentence)


def test_the_root_is_split_around_the_blocks() -> None:
    assert flats(traced(GPT)) == ["root.pre", *(f"blocks.{i}" for i in range(4)), "root.post"]


@pytest.mark.parametrize(
    "units",
    [
        "blocks.*.attention",
        pytest.param("class:Linear", marks=pytest.mark.slow),
        pytest.param("min:40000", marks=pytest.mark.slow),
    ],
)
def test_any_units_compute_the_same(units: str) -> None:
    assert_equals_eager(GPT, units=units)


def test_units_that_are_never_called_are_refused() -> None:
    with pytest.raises(UserError, match="--units blocks names only modules that the model never"):
        traced(GPT, units="blocks")


def test_a_model_without_repetition_is_one_unit(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class M(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).square().mean()\n\n"
        "def model():\n    return M(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))\n\n"
        "def batch():\n    return (torch.ones(1, 2),)\n"
    )
    program = assert_equals_eager(path)
    assert flats(program) == ["root"]
    assert [s.name for s in program.segments] == ["root.forward", "root.backward", "root.evaluate"]


@pytest.mark.slow
def test_parameters_between_encoder_and_decoder_are_a_part_of_the_root(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class M(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = nn.Embedding(8, 4)\n"
        "        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))\n"
        "        self.norm = nn.LayerNorm(4)\n"
        "        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        h = self.embed(x)\n"
        "        for layer in self.encoder:\n"
        "            h = torch.relu(layer(h))\n"
        "        m, h = self.norm(h), self.embed(x)\n"
        "        for layer in self.decoder:\n"
        "            h = torch.relu(layer(h) + m)\n"
        "        return h.square().mean()\n\n"
        "def model():\n    return M()\n\n"
        "def batch():\n    return (torch.arange(6).view(2, 3),)\n"
    )
    program = assert_equals_eager(path)
    assert flats(program) == [
        "root.pre", "encoder.0", "encoder.1", "root.mid", "decoder.0", "decoder.1"
    ]  # fmt: skip
