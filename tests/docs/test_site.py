"""The documentation site is built without a warning, and its reference has all public names."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import zeroir

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_has_all_public_names() -> None:
    documented = re.findall(
        r"^\.\. auto\w+:: zeroir\.(\w+)$", (DOCS / "api.rst").read_text("utf-8"), re.M
    )
    assert sorted(documented) == sorted(vars(zeroir)["__all__"])


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("furo") is None or find_spec("myst_parser") is None,
    reason="Sphinx, which the extra `docs` installs, is not here",
)
def test_the_site_has_no_wrong_link(tmp_path: Path) -> None:
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "zeroir.CompiledProgram.engine" in (tmp_path / "api.html").read_text("utf-8")
