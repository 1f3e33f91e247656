"""What every test can ask for."""

from __future__ import annotations

import gc
import getpass
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.examples import examples

_SUPPORT = Path(__file__).parent / "support"
_MODELS = frozenset(("gpt", *(path.stem for path in (_SUPPORT / "models").glob("*.py"))))

# Inductor's headers are compiled once, and not for each cache of kernels; torch has them there, too.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
)

# Programs are lowered in each test that compiles one, also in the processes that it starts.
os.environ["ZEROIR_KEEP_PROGRAMS"] = "off"

# Modules are no garbage: collecting while torch is imported takes time and finds nothing.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests compare with (golden texts, schema lock, stored artefacts) anew",
    )


def pytest_configure() -> None:
    """What a test of hypothesis does not say itself."""
    settings.register_profile("here", examples(100))
    settings.load_profile("here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What has a time limit of its own takes longest and goes first, lest one worker ends with it alone.

    Then the tests of each model follow each other, for the worker that has captured it.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, str]:
    if item.get_closest_marker("timeout") is not None:
        return 0, ""
    _, _, parameters = item.name.partition("[")
    words = (Path(word).stem for word in parameters.rstrip("]").split("-"))
    model = next((word for word in words if word in _MODELS), None)
    return (2, "") if model is None else (1, model)


def pytest_collection_finish() -> None:
    """What was imported stays; a collection that looks at it again takes most of a second."""
    if "zeroir.frontend.lowering.tracing" in sys.modules:
        # Else no test of this run compiles a model itself, and the frontend takes seconds to import.
        from tests.support import captures

        captures.share()
    gc.freeze()
    gc.enable()
    # Graphs are many objects that live long, among which each collection looks in vain.
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of this run of the suite, which all its workers share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def kept_compilers() -> Iterator[None]:
    """Engines of this process leave the processes that compile their kernels to those of later tests."""
    from tests.support import compilers

    with compilers.kept():
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Mapping[str, str]]:
    """An emulator of S3; the environment in which clients find it."""
    from tests.support import object_store

    with object_store.running() as environment:
        yield environment


@pytest.fixture
def s3_environment(
    s3_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """The environment of clients of an emulator of S3, which the test has."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_bucket(s3_environment: Mapping[str, str]) -> str:
    """The URL of a new bucket of an emulator of S3."""
    from tests.support import object_store

    assert s3_environment
    return object_store.make_bucket(f"bucket-{secrets.token_hex(6)}")
