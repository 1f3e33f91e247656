"""The distributions: what they hold, and that the wheel lives beside a user's modules of the same names."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"),
    *("zeroir", "passes", "runtime"),
)

USER_SCRIPT = """
import sys
from pathlib import Path

import passes
import runtime
import zeroir
import zeroir.passes
import zeroir.runtime

here, site = Path(__file__).parent, Path(sys.argv[1])
assert runtime.OWNER == passes.OWNER == "user"
assert Path(runtime.__file__).parent == Path(passes.__file__).parent == here
for module in (zeroir, zeroir.passes, zeroir.runtime):
    assert Path(module.__file__).is_relative_to(site), module.__file__
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return what a command printed, which has to succeed."""
    result = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def _copy_sources(folder: Path) -> None:
    """Copy the sources as a clone has them, with the symbolic links."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source distribution from a copy of the sources, with a stray test, and the wheel from that."""
    source = tmp_path_factory.mktemp("source")
    _copy_sources(source)
    (source / "tests").mkdir()
    (source / "tests" / "test_stray.py").touch()
    built = _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=source)
    assert "would be ignored" not in built, "setuptools found data that package-data does not name"
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.mark.slow
def test_one_top_level_name_holds_everything(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == _package_files()
    assert "zeroir/py.typed" in names
    assert {Path(name).suffix for name in names} >= {".css", ".html", ".js", ".toml", ".cpp", ".h"}


@pytest.mark.slow
def test_the_source_distribution_holds_the_package_and_no_stray_tests(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {entry.name.partition("/")[2] for entry in archive if entry.isfile()}
    assert names >= _package_files() | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert not any(name.startswith("tests/") for name in names)


def _package_files() -> set[str]:
    """The files of the package, those behind the two symbolic links too."""
    package = ROOT / "zeroir"
    return {
        path.relative_to(ROOT).as_posix()
        for folder in (package, package / "passes", package / "runtime")
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_a_users_own_runtime_and_passes_stay_theirs(wheel: Path, tmp_path: Path) -> None:
    site, user = tmp_path / "site", tmp_path / "user"
    user.mkdir()
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    _run(sys.executable, *install, site, wheel, cwd=tmp_path)
    for name in ("runtime.py", "passes.py"):
        (user / name).write_text('OWNER = "user"\n', encoding="utf-8")
    (user / "train.py").write_text(USER_SCRIPT, encoding="utf-8")
    _run(sys.executable, "train.py", site, cwd=user, PYTHONPATH=str(site))


SCRIPT_BESIDE_A_CLONE = """
import site
import sys
from pathlib import Path

site.addsitedir(sys.argv[1])
import zeroir

here = Path(__file__).parent
assert zeroir.__file__, "a namespace package"
assert Path(zeroir.__file__) == here / "zeroir" / "zeroir" / "__init__.py", zeroir.__file__
"""


@pytest.mark.slow
def test_a_clone_named_zeroir_beside_a_script_is_no_namespace_package(tmp_path: Path) -> None:
    clone, site, wheels = tmp_path / "zeroir", tmp_path / "site", tmp_path / "wheels"
    clone.mkdir()
    _copy_sources(clone)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    _run(sys.executable, "-c", build, cwd=clone)
    (editable,) = wheels.glob("*.whl")
    zipfile.ZipFile(editable).extractall(site)
    (tmp_path / "train.py").write_text(SCRIPT_BESIDE_A_CLONE, encoding="utf-8")
    # Without `site`, so that no other install of this environment is found first.
    _run(sys.executable, "-S", "train.py", site, cwd=tmp_path, PYTHONPATH="")


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_a_checkout_without_symbolic_links_cannot_be_built(name: str, tmp_path: Path) -> None:
    (tmp_path / "zeroir").mkdir()
    for sound in ("passes", "runtime"):
        (tmp_path / "zeroir" / sound).symlink_to(ROOT / sound)
    shutil.copy(ROOT / "setup.py", tmp_path)
    link = tmp_path / "zeroir" / name
    link.unlink()
    link.write_text(f"../{name}", encoding="utf-8")  # what git writes there without core.symlinks
    build = "from setuptools import build_meta; build_meta.get_requires_for_build_wheel()"
    result = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert f"zeroir/{name} is not the symbolic link" in result.stderr
    assert "git config core.symlinks true" in result.stderr
