"""Load a model file: the Python file in which a user defines ``model`` and ``batch``.

The file is read once and hashed, and so are the user's modules that it imports. It is executed from that text, under a
name of its own, so that it neither shadows nor is shadowed by another module; while its code runs, its folder stands
first on ``sys.path``, as for a script.
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
from zeroir.frontend.imports import hashes_of_imports, hashes_of_modules
from zeroir.frontend.regions import line_of_caller, noting_autocasts
from zeroir.torch_ops.devices import one_device

_MODULE = "_zeroir_model_"
_IMPORTS = "_zeroir_imports"
"""Where a model file's module keeps the hashes of the user's modules that it imported."""

Batch = Sequence[object] | Mapping[str, object] | Tensor
"""One rank's micro-batch: a tuple or dict of tensors, possibly nested, or one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model file that was read and not run. ``path`` is as the user wrote it, ``name`` that of the factory."""

    path: Path
    name: str
    text: bytes

    @property
    def sha256(self) -> str:
        """Of the file's bytes."""
        return hashlib.sha256(self.text).hexdigest()

    def imports(self, others: Iterable[str] = ()) -> dict[str, str]:
        """SHA-256 by name of the user's modules that it imports, and of the ``others`` that there are."""
        with _folder_first(self.path):
            found = hashes_of_imports(self.text)
            return {**hashes_of_modules(set(others) - set(found)), **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What a model file offers. ``path`` is as the user wrote it; ``sha256`` is of the file's bytes.

    ``imports`` are the user's modules that it imports, by name, with the SHA-256 of each. ``autocasts`` are the
    accelerators for which it asked for autocast while it was executed, as decorators do, by ``file:line``.
    ``build`` makes the module whose forward returns the loss; ``model`` makes it and then calls the file's optional
    ``init`` on each of its modules, children first. ``batch`` makes example inputs. All of them raise UserError where
    the user's code raises, naming the line, and leave out the devices that it names. ``batches(rank, world_size, seed,
    start_step=0)`` is optional.
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
        """Names of the user's Python modules in this process: the file's own, and those that it imports."""
        return (_module_name(self.sha256), *self.imports)


def load_model_file(spec: str) -> ModelFile:
    """Load ``path/to/model.py``, or ``path/to/model.py:factory`` to call ``factory`` in the place of ``model``.

    Raises:
        UserError: where the file cannot be read, is not Python, raises, or lacks ``model`` or ``batch``.
    """
    return run_model_file(read_model_file(spec))


def read_model_file(spec: str) -> ModelSource:
    """Read ``path/to/model.py``, or ``path/to/model.py:factory``, and run nothing.

    Raises:
        UserError: where the file cannot be read.
    """
    path, name = _split(spec)
    return ModelSource(path=path, name=name, text=_read(path))


def run_model_file(source: ModelSource) -> ModelFile:
    """Execute a model file.

    Raises:
        UserError: where it is not Python, raises, or lacks ``model`` or ``batch``.
    """
    path, name, digest = source.path, source.name, source.sha256
    _forget_changed_modules()
    known = set(sys.modules)
    module = ModuleType(_module_name(digest))
    module.__file__ = str(path)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[module.__name__] = module
    autocasts: dict[str, str] = {}
    noting = noting_autocasts(autocasts, lambda: line_of_caller(path.parent, in_libraries=False))
    with _folder_first(path), one_device(), noting:
        try:
            exec(compile(source.text, str(path), "exec"), module.__dict__)
        except SyntaxError as error:
            raise UserError(f"{path}:{error.lineno} is not valid Python: {error.msg}.") from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raises
            raise UserError(explain(error, path, f"{path} cannot be imported")) from None
    imports = source.imports(set(sys.modules) - known)
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
        found = built()
        if init is None:
            return found
        shapes = parameter_shapes(found)
        with _users_code(path, "init()"):
            found.apply(init)
        require_same_parameters(found, shapes, f"init() in {path}", f"{name}()")
        return found

    def example() -> Batch:
        with _users_code(path, "batch()"):
            return cast("Batch", batch())

    def offered(*arguments: object, **named: object) -> Iterator[Batch]:
        assert batches is not None
        found = batches(*arguments, **named)
        if not isinstance(found, Iterable):
            raise UserError(
                f"batches() in {path} returned {type(found).__name__}; it must return an iterator over batches, as a "
                "function with `yield` does."
            )
        return cast("Iterator[Batch]", iter(found))

    return ModelFile(
        path=path,
        name=name,
        sha256=digest,
        imports=imports,
        autocasts=autocasts,
        build=built,
        model=initialised,
        batch=example,
        batches=None if batches is None else offered,
    )


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}


def require_same_parameters(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], what: str, maker: str
) -> None:
    """UserError where the parameters of a model are no longer those it was made with: ``what`` changed them."""
    now = parameter_shapes(model)
    for name in sorted(now.keys() | shapes.keys()):
        if now.get(name) != shapes.get(name):
            verb = "adds" if name not in shapes else "removes" if name not in now else "reshapes"
            raise UserError(
                f"{what} {verb} the parameter {name}: make all parameters in {maker}, as they are to be trained."
            )


def explain(error: BaseException, path: Path, what: str) -> str:
    """One sentence on an exception in the user's code: what failed, where, and why."""
    line = where(error, path)
    place = f" at {line}" if line else ""
    if is_out_of_memory(error):
        return f"{what}{place}, because memory ran out: {MEMORY_REMEDY}."
    reason = " ".join(str(error).split()) or "no message"
    return f"{what}{place}: {type(error).__name__}: {_shorten(reason)}"


def where(error: BaseException, path: Path) -> str | None:
    """``file:line`` of the innermost frame of an exception that is in the user's file, if any is."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{path}:{frame.lineno}" for frame in frames if Path(frame.filename) == path]
    return lines[-1] if lines else None


def _shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _module_name(sha256: str) -> str:
    return f"{_MODULE}{sha256[:16]}"


def _forget_changed_modules() -> None:
    """Have the user's modules imported anew that earlier model files imported, where one of them changed since.

    All of them, for one that did not change may hold what another one was.
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
    found = getattr(module, name, None)
    if found is None:
        return None
    if not callable(found):
        kind = type(found).__name__
        remedy = f"define `{signature}`" if is_required else "rename it, or make it a function"
        raise UserError(f"`{name}` in {path} is not a function but of type {kind}; {remedy}.")
    return cast("Callable[..., object]", found)


@contextlib.contextmanager
def _users_code(path: Path, what: str) -> Iterator[None]:
    """Run the user's code as a script would, but on no device in particular, and explain what it raises."""
    with _folder_first(path), one_device():
        try:
            yield
        except (ZeroirError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raises
            raise UserError(explain(error, path, f"{what} failed")) from None
