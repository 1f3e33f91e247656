"""Where the headers of CUDA are, with which the host code of a GPU's kernels is compiled."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.absent_cuda import PACKAGES
from zeroir.runtime.kernels import compile_pool, cuda_toolkit
from zeroir.runtime.kernels.cuda_toolkit import _HEADERS


@pytest.fixture(autouse=True)
def without_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what this machine has."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_toolkit, "_USUAL_PLACE", tmp_path / "cuda")


def put_headers(toolkit: Path, headers: Collection[str] = _HEADERS) -> None:
    for header in headers:
        path = toolkit / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_toolkit_comes_before_pips_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    put_headers(packages / "nvidia/cu13")

    def found() -> Path | None:
        return cuda_toolkit.cuda_toolkit(packages)

    assert found() == packages / "nvidia/cu13"
    put_headers(tmp_path / "cuda")
    assert found() == tmp_path / "cuda"
    nvcc = tmp_path / "toolkit/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert found() == tmp_path / "cuda"  # the compiler's own folder has none, as that of a link
    put_headers(tmp_path / "toolkit")
    assert found() == tmp_path / "toolkit"
    monkeypatch.setenv("CUDA_HOME", "/somewhere")
    assert found() == Path("/somewhere")


@pytest.mark.parametrize("missing", _HEADERS)
def test_headers_of_all_three_packages_are_needed(tmp_path: Path, missing: str) -> None:
    put_headers(tmp_path / "nvidia/cu13", {*_HEADERS} - {missing})
    assert cuda_toolkit.cuda_toolkit(tmp_path) is None


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make setup` installs the headers of CUDA")
def test_pips_packages_are_found() -> None:
    """``test_kernels_for_gpus`` compiles with these headers alone."""
    found = cuda_toolkit.cuda_toolkit(PACKAGES)
    assert found is not None
    assert found.parent == PACKAGES / "nvidia"


def test_processes_that_compile_are_told_of_pips_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pool, "cuda_toolkit", lambda: tmp_path)
    with compile_pool._start() as worker:
        environment = b""
        while not environment and worker.poll() is None:  # it is there a moment after the process
            environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
        worker.kill()
    assert f"CUDA_HOME={tmp_path}".encode() in environment.split(b"\0")
