"""Loads a model file: the Python file in which a user defines ``model`` and ``batch``.

The file is read once and hashed, and so are the user's modules that it imports. It is executed from that text, under a
unique module name, so that its name does not clash with another module. While its code runs, its folder is the first
entry of ``sys.path``, as for a script, and the current folder follows, as for ``python -m``. A file of a package, whose
folder has an ``__init__.py``, may use relative imports: the folder above the package is an entry, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast
from unittest import mock

from torch import nn

from zeroir.config.model_spec import Factory, ModelSpec
from zeroir.config.shapes import BatchShapes
from zeroir.errors import UserError, ZeroirError
from zeroir.frontend.capture.code_contexts import line_of_caller, noting_autocasts
from zeroir.frontend.source.given_shapes import given_shapes
from zeroir.frontend.source.imports import (
    MODEL_FILE,
    file_of_module,
    hashes_of_imports,
    hashes_of_modules,
)
from zeroir.frontend.source.source import (
    BatchFunction,
    FileOrigin,
    ModelSource,
    SourceNames,
    explain,
    parameter_shapes,
    require_same_parameters,
    takes_positional,
)
from zeroir.frontend.source.source_lines import (
    line_in,
    line_of_definition,
    line_of_error,
    refusals_at,
)
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.devices import one_device

T = TypeVar("T")

_IMPORTS = "_zeroir_imports"
"""The attribute of a model file's module with the hashes of the user's modules that it imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """A model file that was read but not executed: ``path`` as the user wrote it, and the factory."""

    path: Path
    factory: Factory
    text: bytes

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file's bytes."""
        return hashlib.sha256(self.text).hexdigest()

    def imports(self, more_names: Iterable[str] = ()) -> dict[str, str]:
        """Return the SHA-256 of the user's modules that it imports and of those in ``more_names``, by name."""
        with _importing_from(self.path):
            imported = hashes_of_imports(self.text, _package_of(self.path)[0])
            return {**hashes_of_modules(set(more_names) - set(imported)), **imported}


def load_model_file(spec: str) -> ModelSource:
    """Load ``path/to/model.py`` or ``package.module``; a suffix ``:factory`` names another function than ``model``.

    ``:factory(layers=12)`` also passes arguments to it.

    Raises:
        UserError: if the file cannot be read, is not Python, raises, or lacks ``model`` or ``batch``.
    """
    return run_model_file(read_model_file(spec))


def importing_from(source: ModelSource) -> AbstractContextManager[None]:
    """Let imports search the folders of a source's file, as for a script; do nothing for a source without a file.

    Use it while the user's generators, data sets and their workers run, which may import modules at that time.
    """
    return contextlib.nullcontext() if source.file is None else _importing_from(source.file.path)


def read_model_file(spec: str, default: Factory | None = None) -> ModelText:
    """Read what ``load_model_file`` takes, without executing it; ``default`` is the factory if none is named.

    Raises:
        UserError: if the file cannot be read.
    """
    parsed = ModelSpec.parse(spec)
    path = _file(parsed)
    return ModelText(path=path, factory=parsed.factory or default or Factory(), text=_read(path))


def run_model_file(text: ModelText) -> ModelSource:
    """Execute a model file; the functions of the source ignore the devices that the user's code names.

    They raise UserError with the line where that code raises. ``model`` calls the file's optional ``init`` on each of
    the module's modules, children first; ``build`` does not.

    Raises:
        UserError: if the file is not Python, raises, or lacks ``model`` or ``batch``.
    """
    path, factory = text.path, text.factory
    _forget_changed_modules()
    modules_before = set(sys.modules)
    module = ModuleType(_module_name(text.sha256))
    module.__file__ = str(path)
    module.__package__, _ = _package_of(path)
    # Dataclasses and pickle look up a class's module by name.
    sys.modules[module.__name__] = module
    autocasts: dict[str, str] = {}
    noting = noting_autocasts(autocasts, lambda: line_of_caller(path.parent, in_libraries=False))
    with _as_script(path), one_device(), noting:
        try:
            exec(compile(text.text, str(path), "exec"), module.__dict__)
        except SyntaxError as error:
            place = path if error.lineno is None else f"{path}:{error.lineno}"
            raise UserError(f"{place} is not valid Python: {error.msg}.") from None
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
    build = functions.factory(factory)
    batch = functions.required("batch", "batch() -> tuple or dict of example tensors")
    loss = functions.optional("loss", "loss(module, batch)", 2)
    weight = functions.optional("weight", "weight(batch)", 1)
    shapes = functions.optional("shapes", "shapes()", 0)
    guarded_batch = functions.guarded(cast("Callable[[], Batch]", batch), "batch()")
    return ModelSource(
        names=SourceNames(
            model=f"the model in {path}",
            maker=f"{factory.call} in {path}",
            batch=f"batch() in {path}",
            loss="the model's forward" if loss is None else f"loss() in {path}",
            maker_line=line_of_definition(getattr(module, factory.name)),
            batch_line=line_of_definition(batch),
        ),
        folder=path.parent,
        build=build,
        model=functions.initialised(build, factory.call),
        batch=guarded_batch,
        loss=loss,
        weight=weight,
        batches=functions.iterator(
            "batches", "batches(rank, world_size, seed, start_step=0)", 3, 4
        ),
        eval_batches=functions.iterator("eval_batches", "eval_batches(rank, world_size, seed)", 3),
        modules=(module.__name__, *imports),
        autocasts=autocasts,
        shapes=None
        if shapes is None
        else functools.partial(_shapes, functions, shapes, guarded_batch, path),
        file=FileOrigin(path=path, factory=factory.text, sha256=text.sha256, imports=imports),
    )


def _shapes(
    functions: _Functions, shapes: Callable[[], object], batch: Callable[[], Batch], path: Path
) -> BatchShapes:
    """Return the shapes that the file's ``shapes`` gives its ``batch``; an error names the line of ``shapes``."""
    given, example = functions.guarded(shapes, "shapes()")(), batch()
    try:
        return given_shapes(given, example, f"batch() in {path}")
    except UserError as error:
        raise UserError(f"{line_of_definition(shapes) or path}: {error}") from None


def _module_name(sha256: str) -> str:
    return f"{MODEL_FILE}{sha256[:16]}"


def _forget_changed_modules() -> None:
    """Unload the user's modules that earlier model files imported, if one of them has changed.

    All are unloaded, because an unchanged module may refer to objects of a changed one.
    """
    earlier: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(MODEL_FILE):
            earlier.update(getattr(module, _IMPORTS, {}))
    loaded = {name: sha256 for name, sha256 in earlier.items() if name in sys.modules}
    if hashes_of_modules(set(loaded)) != loaded:
        for name in loaded:
            del sys.modules[name]
        importlib.invalidate_caches()


def _file(spec: ModelSpec) -> Path:
    """Return the file that a spec names, relative to the current folder if it is below it and given as a module."""
    path = Path(spec.place)
    if not spec.is_module:
        return path
    with _importing_from(path):
        file = file_of_module(spec.place)
    if file is None:
        raise UserError(
            f"There is no model file {spec.place}, and no module {spec.place} in the current folder or installed: name "
            "a file, such as model.py, or a module, such as package.module."
        )
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _package_of(path: Path) -> tuple[str, Path]:
    """Return the package of a file, and the folder above it; ``""`` and the file's folder where it is in none.

    A package is a folder with ``__init__.py``.
    """
    folder = path.resolve().parent
    names: list[str] = []
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(names)), folder


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; name the model file in it, for instance {path}/model.py."
        )
    if path.suffix == ".zir" and path.is_file():
        raise UserError(
            f"{path} is a compiled program; name the model file that it is to be compiled from."
        )
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"There is no model file {path}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


@contextlib.contextmanager
def _importing_from(path: Path) -> Iterator[None]:
    """Let imports search the file's folder, the folder above its package, and the current folder, before all others."""
    _, above_package = _package_of(path)
    places = [path.resolve().parent, above_package]
    with contextlib.suppress(FileNotFoundError):  # the current folder was removed
        places.append(Path.cwd())
    folders = list(dict.fromkeys(map(str, places)))
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


@contextlib.contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Let imports search as for a script, and hide zeroir's arguments from code that parses arguments."""
    with _importing_from(path), mock.patch.object(sys, "argv", [str(path)]):
        yield


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

    def optional(self, name: str, signature: str, *counts: int) -> Callable[..., object] | None:
        """Return the function ``name``, which is called with one of these numbers of arguments.

        None if there is none.
        """
        function = self._function(name, f"rename it, or define `{signature}`")
        if function is not None and not takes_positional(function, counts):
            raise UserError(f"`{name}` in {self.path} has other parameters: define `{signature}`.")
        return function

    def guarded(self, function: Callable[[], T], what: str) -> Callable[[], T]:
        """Return the user's function, run as in a script, but without devices and with explained errors."""

        def call() -> T:
            with _users_code(self.path, what):
                return function()

        return call

    def factory(self, factory: Factory) -> Callable[[], nn.Module]:
        """Return the function that builds the model, bound to its arguments."""
        function = self.required(factory.name, f"{factory.name}() -> torch.nn.Module")
        try:
            inspect.signature(function).bind(*factory.positional, **dict(factory.keywords))
        except TypeError as error:
            raise UserError(
                f"{factory.call} does not fit {factory.name}() in {self.path}: {error}; its arguments are written as "
                f"in '{self.path}:{factory.name}(layers=12)'."
            ) from None
        except ValueError:  # a callable written in C
            pass
        bound = functools.partial(function, *factory.positional, **dict(factory.keywords))
        return self.guarded(cast("Callable[[], nn.Module]", bound), factory.call)

    def initialised(self, build: Callable[[], nn.Module], what: str) -> Callable[[], nn.Module]:
        """Return ``build``, called ``what`` in messages, followed by the file's ``init`` where there is one."""
        init = cast("Callable[[nn.Module], None] | None", self.optional("init", "init(module)", 1))
        if init is None:
            return build

        def initialised() -> nn.Module:
            model = build()
            shapes = parameter_shapes(model)
            with _users_code(self.path, "init()"):
                model.apply(init)
            with refusals_at(line_of_definition(init)):
                require_same_parameters(model, shapes, f"init() in {self.path}", what)
            return model

        return initialised

    def iterator(self, name: str, signature: str, *counts: int) -> BatchFunction | None:
        """Return the function ``name``, with one of these parameter counts, which must return an iterable of batches.

        Return None if there is none.
        """
        function = self.optional(name, signature, *counts)
        if function is None:
            return None

        @functools.wraps(function)
        def iterable(*args: object, **kwargs: object) -> Iterable[Batch]:
            batches = function(*args, **kwargs)
            if not (isinstance(batches, Iterable) or hasattr(type(batches), "__getitem__")):
                with refusals_at(line_of_definition(function)):
                    raise UserError(
                        f"{name}() in {self.path} returned {type(batches).__name__}; it must return an iterable over "
                        "batches, such as a DataLoader, a list, or what a function with `yield` returns."
                    )
            return cast("Iterable[Batch]", batches)

        return iterable

    def _function(self, name: str, remedy: str) -> Callable[..., object] | None:
        function = getattr(self.module, name, None)
        if function is None:
            return None
        if isinstance(function, nn.Module):
            raise UserError(
                f"`{name}` in {self.path} is a module, not a function: write `def {name}(): return ...`, so that "
                "each process makes its own."
            )
        if not callable(function):
            kind = type(function).__name__
            raise UserError(
                f"`{name}` in {self.path} is not a function but of type {kind}; {remedy}."
            )
        return cast("Callable[..., object]", function)


@contextlib.contextmanager
def _users_code(path: Path, what: str) -> Iterator[None]:
    """Run the user's code as in a script, but ignore the devices that it names, and explain its errors."""
    with _as_script(path), one_device():
        try:
            yield
        except (ZeroirError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code
            raise UserError(explain(error, line_of_error(error), f"{what} failed")) from None
