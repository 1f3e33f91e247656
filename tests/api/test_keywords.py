"""The typed keywords of the public functions: the fields of the options, and what a type checker says of them."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import zeroir
from tests.support.sources import nodes
from zeroir.api.keywords import KEYWORDS, CompileKeywords, EstimateKeywords, flat_values
from zeroir.config import CompileOptions, make_options
from zeroir.cost.estimate_options import EstimateOptions
from zeroir.errors import UserError

ROOT = Path(__file__).parents[2]
# Only the public functions and what their signatures name is read, so that it takes seconds.
CONFIGURATION = """\
[mypy]
strict = true
follow_imports = skip
ignore_missing_imports = true
disable_error_code = misc,no-any-return
[mypy-zeroir]
follow_imports = silent
[mypy-zeroir.api,zeroir.api.compiled,zeroir.api.compiling,zeroir.api.search.costs,zeroir.api.keywords,zeroir.api.search.plan]
follow_imports = silent
[mypy-zeroir.config.*,zeroir.cost.estimate,zeroir.ir.optimizers.catalogue,zeroir.ir.ops]
follow_imports = silent
"""
RIGHT = (
    'zeroir.compile("model.py")',
    'zeroir.compile("model.py", stage=3, precision="bf16", recompute="blocks.*", clip=1.0)',
    'zeroir.compile("model.py", optimizer="sgd", group="a:lr=1", mesh=None)',
    'zeroir.compile("model.py", offload=zeroir.Offload(what=("optimizer",), fraction=0.5))',
    'zeroir.plan("model.py", "dgx-h100", memory="80GB", most_tried=20, world_size=8)',
    'zeroir.estimate(7.5e9, world_size=64, optimizer="adafactor", offload="optimizer")',
)
WRONG = (
    ('zeroir.compile("model.py", stages=3)', "call-arg"),
    ('zeroir.compile("model.py", stage="three")', "arg-type"),
    ('zeroir.compile("model.py", precision="fp8")', "arg-type"),
    ('zeroir.compile("model.py", optimizer="lbfgs")', "arg-type"),
    ('zeroir.compile("model.py", unshard=3)', "arg-type"),
    ('zeroir.plan("model.py", budget="80GB")', "call-arg"),
    ('zeroir.plan("model.py", stage=None)', "arg-type"),
    ("zeroir.estimate(7.5e9, stage=3)", "call-arg"),
    ("zeroir.estimate(7.5e9, offload=3)", "arg-type"),
    ('zeroir.compiled("model.py")', "attr-defined"),
)


def _alternatives(hint: object) -> set[object]:
    """The members of a union, and each value of a literal."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return set(itertools.chain.from_iterable(map(_alternatives, get_args(hint))))
    return set(get_args(hint)) if origin is Literal else {hint}


@pytest.mark.parametrize(
    ("keywords", "options", "positional"),
    [
        (CompileKeywords, CompileOptions, {"lr", "optimizer_bits", "shapes"}),
        (EstimateKeywords, EstimateOptions, {"params"}),
    ],
)
def test_the_keywords_are_the_fields_of_the_options(
    keywords: type, options: type[BaseModel], positional: set[str]
) -> None:
    hints = get_type_hints(keywords)
    for flat in positional:
        hints.pop(flat, None)
    assert list(hints) == [name for name in options.model_fields if name not in positional]
    for name, hint in hints.items():
        accepted = _alternatives(hint)
        for alternative in _alternatives(options.model_fields[name].annotation):
            # A field that holds several names accepts any sequence of them.
            is_tuple = get_origin(alternative) is tuple
            assert is_tuple or alternative in accepted, name


def test_what_the_types_allow_beyond_the_fields_is_valid() -> None:
    chosen = make_options({"world_size": 1, "keep_fp32": ["norm", "head"], "unshard": "a,b"})
    assert chosen.precision.keep_fp32 == ("norm", "head")
    assert chosen.unshard.units == ("a", "b")


def test_a_keyword_that_is_a_part_of_an_object_names_it() -> None:
    for keyword, sentence in {
        "offload_to": r"write offload=zeroir\.Offload\(to=\.\.\.\)",
        "loss_scale_window": r"write loss_scale=zeroir\.LossScale\(window=\.\.\.\)",
        "beta2": r"optimizer=zeroir\.optim",
        "stages": r"did you mean stage=\?",
    }.items():
        with pytest.raises(UserError, match=sentence):
            flat_values({keyword: 1})


def test_objects_of_another_class_and_options_given_twice_are_refused() -> None:
    with pytest.raises(UserError, match=r"offload= is a zeroir\.Prefetch"):
        flat_values({"offload": zeroir.Prefetch(units=2)})
    with pytest.raises(UserError, match="lr is given twice"):
        flat_values({"optimizer": zeroir.optim.AdamW(lr=0.1), "lr": 0.2})


def test_there_are_at_most_25_keywords() -> None:
    own = set(inspect.signature(zeroir.compile).parameters) - {"model", "batch", "options"}
    assert len({*KEYWORDS, *own}) <= 25


@pytest.mark.slow
def test_a_type_checker_accepts_right_options_and_rejects_wrong_ones(tmp_path: Path) -> None:
    configuration = tmp_path / "mypy.ini"
    configuration.write_text(CONFIGURATION)
    script = tmp_path / "script.py"
    script.write_text("\n".join(("import zeroir", *RIGHT, *(code for code, _ in WRONG))))
    # In a process of its own: mypy raises the recursion limit of the one that it runs in.
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "mypy"),
            *("--config-file", str(configuration), "--cache-dir", str(tmp_path / "cache")),
            *("--explicit-package-bases", "--namespace-packages", "--hide-error-context"),
            *("--show-error-codes", "--no-error-summary", "--no-pretty", str(script)),
        ],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not answer.stderr
    printed = answer.stdout
    errors = [line for line in printed.splitlines() if ": error: " in line]
    first = 2 + len(RIGHT)
    expected = [(str(first + at), f"[{code}]") for at, (_, code) in enumerate(WRONG)]
    assert [(line.split(":")[1], line.split()[-1]) for line in errors] == expected, printed


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("ZeroirStrategy", "lightning", "lightning"), ("prepare", "accelerate", "huggingface")],
)
def test_a_name_whose_package_is_not_installed_says_what_to_install(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"zeroir.integrations.{package}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for imported in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(vars(zeroir), name, raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        getattr(zeroir, name)
    assert f"zeroir.{name} needs {package}" in str(caught.value)
    assert f"pip install 'zeroir[{extra}]'" in str(caught.value)


def test_the_public_names_are_there() -> None:
    assert {"Engine", "Evaluation", "StepResult", "CompiledProgram", "CompileOptions"} <= set(
        vars(zeroir)["__all__"]
    )
    for name in sorted(
        {*vars(zeroir)["__all__"]} - {"ZeroirStrategy", "ZeroirTrainer", "prepare"}
    ):  # They need further packages.
        home = zeroir.optim.__name__ if name == "optim" else getattr(zeroir, name).__module__
        assert home.startswith("zeroir.")


def test_type_checkers_and_python_find_the_same_public_names() -> None:
    (block,) = (
        node
        for node in nodes(ROOT / "zeroir/__init__.py")
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    renamed = {
        ast.unparse(node.value): ast.unparse(node.targets[0])
        for node in block.body
        if isinstance(node, ast.Assign)
    }
    found = {
        renamed.get(name.name, name.asname): f"{node.module}.{name.name}"
        for node in imports
        for name in node.names
    }
    names = {**zeroir._HOMES, "optim": "zeroir"}
    assert found == {
        name: f"{home}.{zeroir._NAMES_THERE.get(name, name)}" for name, home in names.items()
    }
