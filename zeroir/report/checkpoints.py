"""Checkpoints as tables for a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from rich.console import Group, RenderableType
from rich.text import Text

from zeroir.checkpoint.damage import Verification
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.manifest import MANIFEST_NAME, Manifest
from zeroir.checkpoint.reading import read_manifest
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.checkpoint.storage import join
from zeroir.checkpoint.storages import open_storage
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import format_bytes
from zeroir.report.names import counted, shortened
from zeroir.report.tables import Lines, columns_table, facts_table

_SHOWN_OPTIONS = ("stage", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint of a folder. ``problem`` says why it cannot be loaded, judging by its manifest and file sizes."""

    path: str
    manifest: Manifest | None
    problem: str | None


def list_checkpoints(root: str) -> tuple[ListedCheckpoint, ...]:
    """List the checkpoints of a folder, newest first. Manifests are read, and the sizes of files compared.

    Raises:
        UserError: if there is none.
    """
    checkpoints = tuple(_listed(listed.path) for listed in CheckpointFolder(root=root).list())
    if not checkpoints:
        if open_storage(root).size_bytes(join(root, MANIFEST_NAME)) is not None:
            raise UserError(
                f"'{root}' is one checkpoint: see `zeroir checkpoint show`, or name the folder that it is in."
            )
        raise UserError(
            f"'{root}' contains no checkpoints: name the folder that `zeroir run --save` was given."
        )
    return checkpoints


def _listed(path: str) -> ListedCheckpoint:
    try:
        manifest = read_manifest(path)
    except UserError as error:
        return ListedCheckpoint(path=path, manifest=None, problem=str(error))
    storage = open_storage(path)
    for file in manifest.files:
        size_bytes = storage.size_bytes(join(path, file.name))
        if size_bytes != file.size_bytes:
            actual = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            problem = f"'{join(path, file.name)}' {actual} instead of {file.size_bytes} bytes"
            return ListedCheckpoint(path=path, manifest=manifest, problem=problem)
    return ListedCheckpoint(path=path, manifest=manifest, problem=None)


def render_checkpoints(checkpoints: Sequence[ListedCheckpoint]) -> RenderableType:
    """Render one line for each checkpoint, and below the table the problems of damaged ones."""
    metrics = list(
        dict.fromkeys(
            name for listed in checkpoints if listed.manifest for name in listed.manifest.metrics
        )
    )
    figures = {"step", "size", "ranks", *metrics}
    table = columns_table(
        "checkpoint", "step", "saved", "size", "ranks", *metrics, "", figures=figures
    )
    for listed in checkpoints:
        manifest, name = listed.manifest, listed.path.rstrip("/").rpartition("/")[2]
        verdict = Text("damaged", style="red") if listed.problem else Text()
        if manifest is None:
            table.add_row(name, *[""] * (4 + len(metrics)), verdict)
            continue
        table.add_row(
            name,
            str(manifest.step),
            manifest.origin.saved_at,
            format_bytes(_size_bytes(manifest)),
            str(manifest.origin.world_size),
            *(
                f"{manifest.metrics[each]:g}" if each in manifest.metrics else ""
                for each in metrics
            ),
            verdict,
        )
    problems = [Text(f"\n{listed.problem}") for listed in checkpoints if listed.problem]
    return Group(Lines(table=table, is_foldable=True), *problems)


def checkpoints_json(checkpoints: Sequence[ListedCheckpoint]) -> dict[str, object]:
    """Return the checkpoints as plain data."""
    return {
        "checkpoints": [
            {
                "path": listed.path,
                "problem": listed.problem,
                **({} if listed.manifest is None else _facts_json(listed.manifest)),
            }
            for listed in checkpoints
        ]
    }


def _facts_json(manifest: Manifest) -> dict[str, object]:
    return {
        "step": manifest.step,
        "saved_at": manifest.origin.saved_at,
        "size_bytes": _size_bytes(manifest),
        "world_size": manifest.origin.world_size,
        "metrics": {name: _plain(value) for name, value in manifest.metrics.items()},
    }


def _size_bytes(manifest: Manifest) -> int:
    return sum(file.size_bytes for file in manifest.files)


def render_manifest(path: str, manifest: Manifest, *, has_tensors: bool) -> RenderableType:
    """Render the contents of a checkpoint; with ``has_tensors`` every parameter, buffer, scalar and setting."""
    facts = facts_table()
    for name, fact in _facts(path, manifest):
        facts.add_row(name, fact)
    quantities = columns_table(
        "quantity", "dtype", "elements", "size", figures=("elements", "size"), title="quantities"
    )
    for (quantity, dtype), (numel, size_bytes) in _quantities(manifest).items():
        quantities.add_row(quantity, dtype, f"{numel:,}", format_bytes(size_bytes))
    files = columns_table(
        "file", "tensors", "size", "checksum", figures=("tensors", "size"), title="files"
    )
    for file in manifest.files:
        files.add_row(
            file.name, str(len(file.tensors)), format_bytes(file.size_bytes), file.checksum
        )
    tables = [quantities, files]
    if has_tensors:
        tensors = columns_table(
            "name", "shape", "dtype", "quantities", figures=("shape",), title="tensors"
        )
        for row in _tensor_rows(manifest):
            tensors.add_row(*row)
        settings = columns_table("name", "value", title="scalars and settings")
        for scalar in manifest.scalars:
            settings.add_row(scalar.name, ", ".join(f"{value:g}" for value in scalar.values))
        for group in manifest.groups:
            for name, value in {"algorithm": group.algorithm, **group.settings}.items():
                settings.add_row(f"{name} of group {group.name}", str(value))
        tables += [tensors, settings]
    return Group(
        Lines(table=facts, is_foldable=True),
        *(Lines(table=table, is_foldable=True) for table in tables if table.row_count),
    )


def _facts(path: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    origin = manifest.origin
    yield "checkpoint", path
    yield "step", str(manifest.step)
    yield (
        "saved",
        f"{origin.saved_at} by zeroir {origin.zeroir}"
        + (f" with torch {origin.torch}" if origin.torch else ""),
    )
    options = dict(origin.options)
    shown = [f"{name} {options[name]}" for name in _SHOWN_OPTIONS if name in options]
    mesh = " ".join(f"{name}={size}" for name, size in origin.mesh)
    yield (
        "saved by",
        ", ".join(
            [*shown, counted(origin.world_size, "rank"), *([f"mesh {mesh}"] if mesh else [])]
        ),
    )
    if origin.program_digest:
        yield "program", origin.program_digest
    yield "size", format_bytes(_size_bytes(manifest))
    parameters = [slot for flat in manifest.flats for slot in flat.parameters]
    numel = sum(prod(slot.shape) for slot in parameters)
    yield "parameters", f"{counted(len(parameters), 'tensor')} of {counted(numel, 'element')}"
    if manifest.buffers:
        names = list(dict.fromkeys(buffer.name for buffer in manifest.buffers))
        yield "buffers", f"{len(names)}: {', '.join(shortened(names))}"
    if manifest.seed is not None:
        yield "seed", str(manifest.seed)
    if manifest.metrics:
        yield (
            "metrics",
            ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items()),
        )
    if manifest.open_step is not None:
        yield (
            "open step",
            counted(manifest.open_step.micro_steps, "micro-step") + " of the next step",
        )
    states = [str(rank.rank) for rank in manifest.ranks if rank.state is not None]
    if states:
        yield "states of ranks", ", ".join(shortened(states))


def _quantities(manifest: Manifest) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Return the elements and bytes of each quantity and dtype, including padding."""
    numels: dict[tuple[str, str], int] = {}
    numel_by_tensor = {
        (file.name, tensor.name): tensor.numel for file in manifest.files for tensor in file.tensors
    }
    for flat in manifest.flats:
        for quantity in flat.quantities:
            key = quantity.name, quantity.dtype
            stored = sum(piece.stop - piece.start for piece in quantity.pieces)
            numels[key] = numels.get(key, 0) + stored
    for buffer in manifest.buffers:
        key = "buffer", buffer.dtype
        numels[key] = numels.get(key, 0) + numel_by_tensor.get((buffer.file, buffer.tensor), 0)
    return {key: (numel, numel * ITEMSIZE_BYTES[key[1]]) for key, numel in numels.items()}


def _tensor_rows(manifest: Manifest) -> Iterator[tuple[str, str, str, str]]:
    for flat in manifest.flats:
        quantities = ", ".join(quantity.name for quantity in flat.quantities)
        for slot in flat.parameters:
            name = " = ".join((slot.name, *slot.aliases))
            yield name, _shape(slot.shape), flat.dtype, quantities
    for buffer in manifest.buffers:
        names = ", ".join(shortened([str(rank) for rank in buffer.ranks]))
        ranks = f"rank {names}" if len(buffer.ranks) == 1 else f"ranks {names}"
        if len(buffer.ranks) == manifest.origin.world_size:
            ranks = "all ranks"
        yield buffer.name, _shape(buffer.shape), buffer.dtype, f"buffer of {ranks}"


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def render_verification(verification: Verification) -> RenderableType:
    """Render a sentence for each damage, or one that says that there is none."""
    foreign = [
        Text(f"{name} is no part of the checkpoint; nothing reads it.", style="yellow")
        for name in verification.foreign_names
    ]
    if verification.damages:
        return Group(*(Text(damage.sentence, style="red") for damage in verification.damages))
    assert verification.manifest is not None
    files = counted(len(verification.manifest.files), "file")
    whole = f"{verification.path} is whole: {files}, {format_bytes(verification.size_bytes)}."
    return Group(*foreign, Text(whole, style="green"))


def verification_json(verification: Verification) -> dict[str, object]:
    """Return the verification as plain data."""
    return {
        "path": verification.path,
        "is_whole": not verification.damages,
        "size_bytes": verification.size_bytes,
        "damages": [asdict(damage) for damage in verification.damages],
        "foreign_names": list(verification.foreign_names),
    }


def _plain(value: float) -> float | str:
    """Return a number as JSON can represent it: infinities and NaN as strings."""
    return value if math.isfinite(value) else str(value)
