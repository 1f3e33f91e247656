"""The user's modules that a file imports are found without running them."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from zeroir.frontend.source.imports import hashes_of_imports, hashes_of_modules

FILES = {
    "top.py": "import deep.inner.leaf\n",
    "deep/__init__.py": "raise SystemExit('ran')\n",
    "deep/inner/__init__.py": "from . import sibling\nfrom .. import cousin as c\nfrom ...... import no\n",
    "deep/inner/leaf.py": "from deep.cousin import *\n",
    "deep/inner/sibling.py": "def f():\n    import lazy\n",
    "deep/cousin.py": "import top\n",
    "lazy.py": "not python at all(",
    "folder/module.py": "",
    "package/__init__.py": "",
    "package/folder/module.py": "",
    "env/site-packages/installed.py": "import folder.module\n",
    "unused.py": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "env" / "site-packages")


def test_imports_are_followed_through_packages_and_cycles() -> None:
    source = (
        b"import os, torch, msgpack, zeroir.api, no_such\nimport top\nfrom folder import module\n"
    )
    hashes = hashes_of_imports(source)
    assert set(hashes) == {
        "top",
        *("deep", "deep.inner", "deep.inner.leaf", "deep.inner.sibling", "deep.cousin"),
        "lazy",
        "folder.module",
    }
    assert hashes["lazy"] == hashlib.sha256(FILES["lazy.py"].encode()).hexdigest()
    assert hashes_of_imports(b"def f(:") == {}


def test_modules_are_found_by_name() -> None:
    names = {"deep.inner.leaf", "unused", "torch", "os.path", "no_such", "deep.none", "..", ""}
    assert set(hashes_of_modules(names)) == {"deep.inner.leaf", "unused"}


def test_a_folder_without_init_may_lie_in_a_package_that_is_not_imported() -> None:
    assert set(hashes_of_imports(b"import package.folder.module\n")) == {
        "package",
        "package.folder.module",
    }
    assert "package" not in sys.modules


def test_modules_of_another_environment_are_installed() -> None:
    assert hashes_of_imports(b"import installed\n") == {}
