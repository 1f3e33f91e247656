"""Loading model files: their functions, their isolation, and the messages about wrong ones."""

import hashlib
import json
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.support.zygote import run_forked
from zeroir.config.model_spec import ModelSpec
from zeroir.errors import UserError
from zeroir.frontend import load_model_file
from zeroir.frontend.source.entry import importing_from

GOOD = """
import torch
from torch import nn

def model():
    return nn.Linear(2, 3)

def other():
    return nn.Linear(4, 5)

def batch():
    return (torch.ones(1, 2),)
"""


def write(tmp_path: Path, text: str, name: str = "model.py") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_file_is_loaded_with_its_hash(tmp_path: Path) -> None:
    spec = write(tmp_path, GOOD)
    model_file = load_model_file(spec)
    assert model_file.file is not None
    assert model_file.file.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert isinstance(model_file.model(), torch.nn.Linear)
    assert model_file.batches is None


def test_a_factory_replaces_model(tmp_path: Path) -> None:
    module = load_model_file(write(tmp_path, GOOD) + ":other").model()
    assert isinstance(module, torch.nn.Linear)
    assert module.out_features == 5


PACKAGE = """
import torch
from torch import nn

from .layers import WIDTH
from shapes import HEIGHT

def build(depth=1, *, bias=True, names=()):
    return nn.Sequential(*(nn.Linear(WIDTH, HEIGHT, bias=bias) for _ in range(depth)))

def batch():
    return (torch.ones(1, WIDTH),)
"""


def test_a_module_of_a_package_in_the_current_folder_is_loaded_with_arguments_of_its_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nets" / "small"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        write(folder, "", "__init__.py")
    write(package, "WIDTH = 3", "layers.py")
    write(package, PACKAGE, "net.py")
    write(tmp_path, "HEIGHT = 5", "shapes.py")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    by_name = load_model_file("nets.small.net:build(2, bias=False, names=['a:b', (1, None)])")
    assert sys.path == before
    assert by_name.file is not None
    assert by_name.file.path == Path("nets/small/net.py")
    assert sorted(by_name.file.imports) == ["nets", "nets.small", "nets.small.layers", "shapes"]
    model = by_name.model()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight"]
    # What a program keeps of it is enough to build the same model again.
    again = load_model_file(f"{by_name.file.path}:{by_name.file.factory}")
    assert again.file == by_name.file
    assert [shape.shape for shape in again.build().parameters()] == [(5, 3), (5, 3)]
    with pytest.raises(UserError, match=r"^build\(height=3\) does not fit build\(\) in .*'height'"):
        load_model_file("nets.small.net:build(height=3)")
    with pytest.raises(UserError, match=r"no model file nets\.large, and no module nets\.large"):
        load_model_file("nets.large:build")


@pytest.mark.parametrize(
    "arguments", ["(", "(layers)", "(**{})", "(1e999)", "(f())", "()()", "(a=1, a=2)", "(1)+f(2)"]
)
def test_arguments_of_a_factory_that_are_no_literals_get_one_sentence(arguments: str) -> None:
    with pytest.raises(UserError, match=r"^'f\(.* does not name a factory: write "):
        ModelSpec.parse(f"model.py:f{arguments}")


@pytest.mark.parametrize(
    ("text", "stem", "factory"),
    [
        ("a/gpt.v2.py", "gpt.v2", None),
        ("gpt.py:build", "gpt", "build"),
        ("a:b/gpt.py:f(x='c:d')", "gpt", "f(x='c:d')"),
        ("nets.gpt:f( 1,y = -2.5 )", "gpt", "f(1, y=-2.5)"),
        ("nets.gpt", "gpt", None),
    ],
)
def test_specs_of_models_are_read(text: str, stem: str, factory: str | None) -> None:
    spec = ModelSpec.parse(text)
    assert spec.stem == stem
    assert (None if spec.factory is None else spec.factory.text) == factory


def test_init_is_called_on_every_module_once_it_is_built(tmp_path: Path) -> None:
    text = GOOD.replace("nn.Linear(2, 3)", "nn.Sequential(nn.Linear(2, 3))") + (
        "def init(module):\n"
        "    if isinstance(module, nn.Linear):\n"
        "        nn.init.constant_(module.weight, 0.5)\n"
        "    else:\n"
        "        nn.init.zeros_(module[0].weight)\n"
    )
    model_file = load_model_file(write(tmp_path, text))
    assert not model_file.model().get_parameter("0.weight").any()
    assert model_file.build().get_parameter("0.weight").any()
    wrong = load_model_file(write(tmp_path, GOOD + "def init(module):\n    module.absent\n"))
    with pytest.raises(UserError, match=r"init\(\) failed at .*model.py:14: AttributeError"):
        wrong.model()


def test_devices_that_a_file_names_are_ignored(tmp_path: Path) -> None:
    text = GOOD.replace("nn.Linear(2, 3)", "nn.Linear(2, 3, device='cuda').cuda().to('cuda:1')")
    text = text.replace(
        "torch.ones(1, 2)", "torch.ones(1, 2, device='cuda').to('cuda', torch.float64)"
    )
    model_file = load_model_file(write(tmp_path, text))
    assert model_file.model().weight.device.type == "cpu"
    (example,) = cast("tuple[object]", model_file.batch())
    assert isinstance(example, Tensor)
    assert example.dtype == torch.float64
    with torch.device("meta"):
        assert model_file.model().weight.is_meta


def test_the_file_hides_no_module_and_its_folder_leaves_sys_path(tmp_path: Path) -> None:
    import json

    write(tmp_path, "WIDTH = 7", "helper_of_the_model.py")
    before = list(sys.path)
    spec = write(tmp_path, "from helper_of_the_model import WIDTH\n" + GOOD, "json.py")
    load_model_file(spec).model()
    assert sys.path == before
    assert sys.modules["json"] is json


def test_a_file_that_parses_arguments_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["zeroir", "compile", "model.py"])
    parsed = (
        "from argparse import ArgumentParser\n"
        "parser = ArgumentParser()\nparser.add_argument('--width', type=int, default=2)\n"
        "width = parser.parse_args().width\n"
    )
    text = parsed + GOOD.replace("(2, 3)", "(width, parser.parse_args().width)")
    module = load_model_file(write(tmp_path, text)).model()
    assert sys.argv[1:] == ["compile", "model.py"]
    assert isinstance(module, torch.nn.Linear)
    assert (module.in_features, module.out_features) == (2, 2)


def test_dataclasses_in_the_file_find_their_module(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "from typing import ClassVar\n\n@dataclass\nclass C:\n    x: int\n    y: ClassVar[int] = 3\n"
    load_model_file(write(tmp_path, text + GOOD))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(:\n", r":1 is not valid Python: invalid syntax"),
        ("import no_such_module\n", r"cannot be imported at .*:1: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", r"cannot be imported at .*:1: SystemExit: 3"),
        ("x = 1\n", r"has no function `model`; define `model\(\) -> torch.nn.Module` in it"),
        ("def model(): ...\n", r"has no function `batch`; define `batch\(\) -> tuple or dict"),
        ("model = 3\ndef batch(): ...\n", r"`model` in .* is not a function but of type int"),
        (GOOD + "init = 3\n", r"`init` in .* is not a function"),
        (GOOD + "model = model()\n", r"`model` in .* is a module, not a function: write `def"),
        (GOOD + "def model(width): ...\n", r"^model\(\) does not fit model\(\) in .* 'width'; its"),
        (GOOD + "def batches(): ...\n", r"`batches` in .* has other parameters: define"),
        (GOOD + "def loss(batch): ...\n", r"other parameters: define `loss\(module, batch\)`"),
        (GOOD + "def weight(): ...\n", r"other parameters: define `weight\(batch\)`"),
        (GOOD + "def init(): ...\n", r"other parameters: define `init\(module\)`"),
        (GOOD + "def eval_batches(rank): ...\n", r"other parameters: define `eval_batches\(r"),
    ],
)
def test_wrong_files_get_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        load_model_file(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_defines_an_operator_is_executed_once(tmp_path: Path) -> None:
    text = "import torch\ntorch.library.define('entry::op', '(Tensor x) -> Tensor')\n" + GOOD
    load_model_file(write(tmp_path, text))
    with pytest.raises(UserError, match=r"model\.py:2 defines an operator for a second time"):
        load_model_file(write(tmp_path, text))


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no model file"):
        load_model_file(str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="is a folder"):
        load_model_file(str(tmp_path))
    with pytest.raises(UserError, match="has no function `absent`"):
        load_model_file(write(tmp_path, GOOD) + ":absent")
    with pytest.raises(UserError, match=r"is a compiled program; name the model file"):
        load_model_file(write(tmp_path, "", "gpt.zir"))
    (tmp_path / "latin.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(UserError, match=r"latin\.py(:\d+)? is not valid Python: .*utf-8"):
        load_model_file(str(tmp_path / "latin.py"))


def test_batches_may_import_what_lies_beside_the_file(tmp_path: Path) -> None:
    write(tmp_path, "VALUES = [1, 2]\n", "beside.py")
    lazy = "def batches(rank, world_size, seed):\n    import beside\n    yield from beside.VALUES\n"
    source = load_model_file(write(tmp_path, GOOD + lazy))
    assert source.batches is not None
    before = list(sys.path)
    with importing_from(source):
        assert list(source.batches(0, 1, 0)) == [1, 2]
    assert sys.path == before


def test_an_exception_in_the_users_function_names_the_line(tmp_path: Path) -> None:
    spec = write(tmp_path, GOOD.replace("nn.Linear(2, 3)", "1 / 0"))
    with pytest.raises(UserError, match=r"model\(\) failed at .*model.py:6: ZeroDivisionError"):
        load_model_file(spec).model()


@pytest.mark.slow
def test_tracing_works_from_an_empty_folder(tmp_path: Path) -> None:
    gpt = Path(__file__).parents[2] / "examples" / "gpt.py"
    folder, program = tmp_path / "empty", tmp_path / "gpt.zir"
    folder.mkdir()
    options = ["--world-size", "1", "-o", str(program), "--json"]
    process = run_forked("zeroir", ["compile", str(gpt), *options], folder)
    assert process.returncode == 0, process.stderr
    facts = json.loads(process.stdout)
    assert (facts["distinct_segments"], facts["world_size"]) == (6, 1)
    assert program.exists()
    assert list(folder.iterdir()) == []
