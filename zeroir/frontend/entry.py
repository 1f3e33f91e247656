"""Load a model file: the Python file in which a user defines ``model`` and ``batch``.

The file is read once and hashed, and so are the user's modules that it imports. It is executed from that text, under a
unique module name, so that it neither hides nor is hidden by another module. While its code runs, its folder is the
first entry of ``sys.path``, as for a script.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import cast

from torch import Tensor, nn

from zeroir.errors import MEMORY_REMEDY, UserError, ZeroirError, is_out_of_memory
from zeroir.frontend.code_contexts import line_of_caller, noting_autocasts
from zeroir.frontend.imports import hashes_of_imports, hashes_of_modules
from zeroir.torch_ops.devices import one_device

_MODULE = "_zeroir_model_"
_IMPORTS = "_zeroir_imports"
"""The attribute of a model file's module that holds the hashes of the user's modules that it imported."""

Batch = Sequence[object] | Mapping[str, object] | Tensor
"""One rank's micro-batch: a tuple or dict of tensors, possibly nested, or one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """The functions of an executed model file. ``path`` is as the user wrote it; ``sha256`` is of the file's bytes.

    ``imports`` maps the names of the user's modules that it imports to their SHA-256. ``autocasts`` maps ``file:line``
    to the accelerator for which the file entered autocast while it was executed, as decorators do.
    ``build`` makes the module whose forward returns the loss; ``model`` makes it and then calls the file's optional
    ``init`` on each of its modules, children first. ``batch`` makes example inputs. These functions ignore the devices
    that the user's code names, and raise UserError with the line where that code raises. ``batches(rank, world_size,
    seed, start_step=0)`` is optional.
    """

    path: Path
    name: str
    sha256: str
    build: Callable[[], nn.Module]
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    batches: Callable[..., Iterator[Batch]] | None
    imports: Mapping[str, str] = field(default_factory=dict)
    autocasts: Mapping[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the user's Python modules in this process: the file's own, and those that it imports."""
        return (_module_name(self.sha256), *self.imports)


def load_model_file(spec: str) -> ModelFile:
    """Load ``path/to/model.py``, or ``path/to/model.py:factory`` to call ``factory`` instead of ``model``.

    Raises:
        UserError: where the file cannot be read, is not Python, raises, or lacks ``model`` or ``batch``.
    """
    return run_model_file(read_model_file(spec))


def read_model_file(spec: str) -> ModelSource:
    """Read ``path/to/model.py``, or ``path/to/model.py:factory``, without executing it.

    Raises:
        UserError: where the file cannot be read.
    """
    path, name = _split(spec)
    return ModelSource(path=path, name=name, text=_read(path))


def run_model_file(source: ModelSource) -> ModelFile:
    """Execute a model file.

    Raises:
        UserError: where the file is not Python, raises, or lacks ``model`` or ``batch``.
    """
    path, name, digest = source.path, source.name, source.sha256
    _forget_changed_modules()
    modules_before = set(sys.modules)
    module = ModuleType(_module_name(digest))
    module.__file__ = str(path)
    # Dataclasses and pickle look up a class's module by name.
    sys.modules[module.__name__] = module
    autocasts: dict[str, str] = {}
    noting = noting_autocasts(autocasts, lambda: line_of_caller(path.parent, in_libraries=False))
    with _folder_first(path), one_device(), noting:
        try:
            exec(compile(source.text, str(path), "exec"), module.__dict__)
        except SyntaxError as error:
            raise UserError(f"{path}:{error.lineno} is not valid Python: {error.msg}.") from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code
            raise UserError(explain(error, path, f"{path} cannot be imported")) from None
    imports = source.imports(set(sys.modules) - modules_before)
    setattr(module, _IMPORTS, imports)
    build = cast(
        "Callable[[], nn.Module]", _required(module, path, name, f"{name}() -> torch.nn.Module")
    )
    batch = _required(module, path, "batch", "batch() -> tuple or dict of example tensors")
    batches = _function(module, path, "batches", "batches(rank, ...)", is_required=False)
    init = cast(
        "Callable[[nn.Module], None] | None",
        _function(module, path, "init", "init(module)", is_required=False),
    )

    def built() -> nn.Module:
        with _users_code(path, f"{name}()"):
            return build()

    def initialised() -> nn.Module:
        module = built()
        if init is None:
            return module
        shapes = parameter_shapes(module)
        with _users_code(path, "init()"):
            module.apply(init)
        require_same_parameters(module, shapes, f"init() in {path}", f"{name}()")
        return module

    def example() -> Batch:
        with _users_code(path, "batch()"):
            return cast("Batch", batch())

    def iterator(*args: object, **kwargs: object) -> Iterator[Batch]:
        assert batches is not None
        batch_source = batches(*args, **kwargs)
        if not isinstance(batch_source, Iterable):
            raise UserError(
                f"batches() in {path} returned {type(batch_source).__name__}; it must return an iterator over batches, "
                "as a function with `yield` does."
            )
        return cast("Iterator[Batch]", iter(batch_source))

    return ModelFile(
        path=path,
        name=name,
        sha256=digest,
        imports=imports,
        autocasts=autocasts,
        build=built,
        model=initialised,
        batch=example,
        batches=None if batches is None else iterator,
    )


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}


def require_same_parameters(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], what: str, maker: str
) -> None:
    """Raise UserError where a model's parameters differ from ``shapes``, with which ``maker`` made them.

    ``what`` is the user's code that changed them.
    """
    current = parameter_shapes(model)
    for name in sorted(current.keys() | shapes.keys()):
        if current.get(name) != shapes.get(name):
            verb = (
                "adds" if name not in shapes else "removes" if name not in current else "reshapes"
            )
            raise UserError(
                f"{what} {verb} the parameter {name}: make all parameters in {maker}, as they are to be trained."
            )


def explain(error: BaseException, path: Path, what: str) -> str:
    """One sentence on an exception in the user's code: what failed, where, and why."""
    line = where(error, path)
    location = f" at {line}" if line else ""
    if is_out_of_memory(error):
        return f"{what}{location}, because memory ran out: {MEMORY_REMEDY}."
    reason = " ".join(str(error).split()) or "no message"
    return f"{what}{location}: {type(error).__name__}: {_shorten(reason)}"


def where(error: BaseException, path: Path) -> str | None:
    """``file:line`` of the innermost frame of an exception that is in the user's file; None where none is."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{path}:{frame.lineno}" for frame in frames if Path(frame.filename) == path]
    return lines[-1] if lines else None


def _shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


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


def _required(module: ModuleType, path: Path, name: str, signature: str) -> Callable[..., object]:
    function = _function(module, path, name, signature, is_required=True)
    if function is None:
        raise UserError(f"{path} has no function `{name}`; define `{signature}` in it.")
    return function


def _function(
    module: ModuleType, path: Path, name: str, signature: str, *, is_required: bool
) -> Callable[..., object] | None:
    function = getattr(module, name, None)
    if function is None:
        return None
    if not callable(function):
        kind = type(function).__name__
        remedy = f"define `{signature}`" if is_required else "rename it, or make it a function"
        raise UserError(f"`{name}` in {path} is not a function but of type {kind}; {remedy}.")
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
            raise UserError(explain(error, path, f"{what} failed")) from None
