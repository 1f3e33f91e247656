"""Load a model file: the Python file in which a user defines ``model`` and ``batch``.

The file is read once and hashed, and so are the user's modules that it imports. It is executed from that text, under a
unique module name, so that it neither hides nor is hidden by another module. While its code runs, its folder is the
first entry of ``sys.path``, as for a script.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

from torch import nn

from zeroir.errors import UserError, ZeroirError
from zeroir.frontend.code_contexts import line_of_caller, noting_autocasts
from zeroir.frontend.imports import hashes_of_imports, hashes_of_modules
from zeroir.frontend.source import (
    BatchFunction,
    FileOrigin,
    ModelSource,
    SourceNames,
    explain,
    line_in,
    parameter_shapes,
    require_same_parameters,
)
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.devices import one_device

T = TypeVar("T")

_MODULE = "_zeroir_model_"
_IMPORTS = "_zeroir_imports"
"""The attribute of a model file's module that holds the hashes of the user's modules that it imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """A model file that was read but not executed: ``path`` as the user wrote it, ``name`` of the factory."""

    path: Path
    name: str
    text: bytes

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file's bytes."""
        return hashlib.sha256(self.text).hexdigest()

    def imports(self, more_names: Iterable[str] = ()) -> dict[str, str]:
        """The SHA-256 of the user's modules that it imports and of those in ``more_names``, by name."""
        with _folder_first(self.path):
            imported = hashes_of_imports(self.text)
            return {**hashes_of_modules(set(more_names) - set(imported)), **imported}


def load_model_file(spec: str) -> ModelSource:
    """Load ``path/to/model.py``, or ``path/to/model.py:factory`` to call ``factory`` instead of ``model``.

    Raises:
        UserError: where the file cannot be read, is not Python, raises, or lacks ``model`` or ``batch``.
    """
    return run_model_file(read_model_file(spec))


def read_model_file(spec: str) -> ModelText:
    """Read ``path/to/model.py``, or ``path/to/model.py:factory``, without executing it.

    Raises:
        UserError: where the file cannot be read.
    """
    path, name = _split(spec)
    return ModelText(path=path, name=name, text=_read(path))


def run_model_file(text: ModelText) -> ModelSource:
    """Execute a model file; the functions of the source ignore the devices that the user's code names.

    They raise UserError with the line where that code raises. ``model`` calls the file's optional ``init`` on each of
    the module's modules, children first; ``build`` does not.

    Raises:
        UserError: where the file is not Python, raises, or lacks ``model`` or ``batch``.
    """
    path, name = text.path, text.name
    _forget_changed_modules()
    modules_before = set(sys.modules)
    module = ModuleType(_module_name(text.sha256))
    module.__file__ = str(path)
    # Dataclasses and pickle look up a class's module by name.
    sys.modules[module.__name__] = module
    autocasts: dict[str, str] = {}
    noting = noting_autocasts(autocasts, lambda: line_of_caller(path.parent, in_libraries=False))
    with _folder_first(path), one_device(), noting:
        try:
            exec(compile(text.text, str(path), "exec"), module.__dict__)
        except SyntaxError as error:
            raise UserError(f"{path}:{error.lineno} is not valid Python: {error.msg}.") from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code
            line = line_in(error, path)
            if "Duplicate registration" in str(error):
                raise UserError(
                    f"{line or path} defines an operator for a second time, because a model file may be executed "
                    "several times in a process: use torch.library.custom_op, or define the operator in a module that "
                    "the file imports."
                ) from None
            raise UserError(explain(error, line, f"{path} cannot be imported")) from None
    imports = text.imports(set(sys.modules) - modules_before)
    setattr(module, _IMPORTS, imports)
    functions = _Functions(module, path)
    build = functions.required(name, f"{name}() -> torch.nn.Module")
    batch = functions.required("batch", "batch() -> tuple or dict of example tensors")
    loss = functions.optional("loss", "loss(module, batch)")
    weight = functions.optional("weight", "weight(batch)")
    return ModelSource(
        names=SourceNames(
            model=f"the model in {path}",
            maker=f"{name}() in {path}",
            batch=f"batch() in {path}",
            loss="the model's forward" if loss is None else f"loss() in {path}",
        ),
        folder=path.parent,
        build=functions.guarded(cast("Callable[[], nn.Module]", build), f"{name}()"),
        model=functions.initialised_model(name),
        batch=functions.guarded(cast("Callable[[], Batch]", batch), "batch()"),
        loss=loss,
        weight=weight,
        batches=functions.iterator("batches", "batches(rank, ...)"),
        eval_batches=functions.iterator("eval_batches", "eval_batches(rank, ...)"),
        modules=(module.__name__, *imports),
        autocasts=autocasts,
        file=FileOrigin(path=path, factory=name, sha256=text.sha256, imports=imports),
    )


def _module_name(sha256: str) -> str:
    return f"{_MODULE}{sha256[:16]}"


def _forget_changed_modules() -> None:
    """Unload the user's modules that earlier model files imported, if one of them has changed.

    All are unloaded, because an unchanged module may hold objects of a changed one.
    """
    earlier: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODULE):
            earlier.update(getattr(module, _IMPORTS, {}))
    loaded = {name: sha256 for name, sha256 in earlier.items() if name in sys.modules}
    if hashes_of_modules(set(loaded)) != loaded:
        for name in loaded:
            del sys.modules[name]
        importlib.invalidate_caches()


def _split(spec: str) -> tuple[Path, str]:
    head, colon, name = spec.rpartition(":")
    if colon and name.isidentifier() and head:
        return Path(head), name
    return Path(spec), "model"


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; name the model file in it, for instance {path}/model.py."
        )
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"There is no model file {path}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


@contextlib.contextmanager
def _folder_first(path: Path) -> Iterator[None]:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


@dataclass(frozen=True, slots=True)
class _Functions:
    """The functions of an executed model file."""

    module: ModuleType
    path: Path

    def required(self, name: str, signature: str) -> Callable[..., object]:
        function = self._function(name, f"define `{signature}`")
        if function is None:
            raise UserError(f"{self.path} has no function `{name}`; define `{signature}` in it.")
        return function

    def optional(self, name: str, signature: str) -> Callable[..., object] | None:
        return self._function(name, f"rename it, or define `{signature}`")

    def guarded(self, function: Callable[[], T], what: str) -> Callable[[], T]:
        """The user's function as a script would run it, but without devices and with explained errors."""

        def call() -> T:
            with _users_code(self.path, what):
                return function()

        return call

    def initialised_model(self, name: str) -> Callable[[], nn.Module]:
        """The factory, followed by the file's ``init`` where there is one."""
        factory = cast("Callable[[], nn.Module]", getattr(self.module, name))
        init = cast("Callable[[nn.Module], None] | None", self.optional("init", "init(module)"))
        built = self.guarded(factory, f"{name}()")
        if init is None:
            return built

        def initialised() -> nn.Module:
            model = built()
            shapes = parameter_shapes(model)
            with _users_code(self.path, "init()"):
                model.apply(init)
            require_same_parameters(model, shapes, f"init() in {self.path}", f"{name}()")
            return model

        return initialised

    def iterator(self, name: str, signature: str) -> BatchFunction | None:
        """The function ``name``, whose result must be an iterable over batches; None where there is none."""
        function = self.optional(name, signature)
        if function is None:
            return None

        @functools.wraps(function)
        def iterable(*args: object, **kwargs: object) -> Iterable[Batch]:
            batches = function(*args, **kwargs)
            if not isinstance(batches, Iterable):
                raise UserError(
                    f"{name}() in {self.path} returned {type(batches).__name__}; it must return an iterable over "
                    "batches, as a function with `yield` does."
                )
            return cast("Iterable[Batch]", batches)

        return iterable

    def _function(self, name: str, remedy: str) -> Callable[..., object] | None:
        function = getattr(self.module, name, None)
        if function is None:
            return None
        if not callable(function):
            kind = type(function).__name__
            raise UserError(
                f"`{name}` in {self.path} is not a function but of type {kind}; {remedy}."
            )
        return cast("Callable[..., object]", function)


@contextlib.contextmanager
def _users_code(path: Path, what: str) -> Iterator[None]:
    """Run the user's code as a script would, but ignore the devices that it names, and explain its errors."""
    with _folder_first(path), one_device():
        try:
            yield
        except (ZeroirError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code
            raise UserError(explain(error, line_in(error, path), f"{what} failed")) from None
