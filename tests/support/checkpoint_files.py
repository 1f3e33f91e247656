"""Small checkpoints, as a job of several ranks would save them, and arbitrary manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod

import numpy as np
import xxhash
from hypothesis import strategies as st

from zeroir.checkpoint.manifest import (
    MASTER,
    Manifest,
    OpenStep,
    Origin,
    Piece,
    RankState,
    StoredBuffer,
    StoredFile,
    StoredFlat,
    StoredGroup,
    StoredParameter,
    StoredQuantity,
    StoredScalar,
    StoredTensor,
)
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES, StoredTensorSpec
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file

ORIGIN = Origin(zeroir="1.0.0", world_size=2, saved_at="2026-01-01T00:00:00Z")


def tensor_to_write(
    name: str, dtype: str, data: bytes
) -> tuple[StoredTensorSpec, list[memoryview]]:
    """A tensor of these bytes."""
    spec = StoredTensorSpec(name=name, dtype=dtype, numel=len(data) // ITEMSIZE_BYTES[dtype])
    return spec, [memoryview(data)]


def rank_bytes(step: int, rank: int, numel: int) -> dict[str, bytes]:
    """The tensors of a rank: half of a flat's masters, and a moment in half precision."""
    first = 10_000 * step + 100 * rank
    elements = np.arange(first, first + numel, dtype=np.uint32)
    return {
        "flat.master": (elements.astype(np.float32) / 7).tobytes(),
        "flat.exp_avg": (elements * 40_503).astype(np.uint16).tobytes(),
    }


def save_checkpoint(
    path: str,
    *,
    step: int,
    ranks: int = 2,
    numel: int = 6,
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Save a checkpoint of one flat, of which each rank has ``numel`` elements."""
    draft = begin(path)
    try:
        files = []
        for rank in range(ranks):
            data = rank_bytes(step, rank, numel)
            tensors = [
                tensor_to_write("flat.exp_avg", "bf16", data["flat.exp_avg"]),
                tensor_to_write("flat.master", "f32", data["flat.master"]),
            ]
            name = draft.file_name(rank)
            files.append(write_file(open_storage(path), draft.folder, name, tensors))
        manifest = flat_manifest(files, step=step, numel=numel, metrics=metrics or {})
        draft.publish(manifest)
    except BaseException:
        draft.abandon()
        raise
    return manifest


def flat_manifest(
    files: list[StoredFile], *, step: int, numel: int, metrics: Mapping[str, float]
) -> Manifest:
    """The manifest of these files: one parameter, padded with one element."""

    def quantity(name: str, dtype: str) -> StoredQuantity:
        pieces = tuple(
            Piece(
                file=file.name, tensor=f"flat.{name}", start=rank * numel, stop=(rank + 1) * numel
            )
            for rank, file in enumerate(files)
        )
        return StoredQuantity(name=name, dtype=dtype, pieces=pieces)

    total = len(files) * numel
    flat = StoredFlat(
        name="flat",
        dtype="bf16",
        is_trainable=True,
        parameters=(StoredParameter(name="weight", offset=0, shape=(max(total - 1, 0),)),),
        quantities=(quantity(MASTER, "f32"), quantity("exp_avg", "bf16")),
    )
    return Manifest(
        step=step, origin=ORIGIN, metrics=dict(metrics), files=tuple(files), flats=(flat,)
    )


def signed_manifest(value: object) -> bytes:
    """The file of any value, valid or not."""
    text = json.dumps(value, separators=(",", ":"))
    checksum = f"xxh3_128:{xxhash.xxh3_128_hexdigest(text.encode())}"
    return f'{{"checksum":"{checksum}","manifest":{text}}}\n'.encode()


_words = st.text(st.characters(codec="utf-8"), max_size=8)
_checksums = st.binary(min_size=16, max_size=16).map(lambda data: f"xxh3_128:{data.hex()}")
_dtypes = st.sampled_from(sorted(ITEMSIZE_BYTES))
_floats = st.floats(allow_nan=False)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=6,
)
_plain_settings = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _words
)
_settings = _plain_settings | st.lists(_plain_settings, max_size=2).map(tuple)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A manifest without contradictions. Of metrics that are no number, none is equal to itself: there are none."""
    names = draw(
        st.lists(st.text("ab.", min_size=1, max_size=6), unique=True, min_size=1, max_size=5)
    )
    ranks = draw(st.integers(1, 3))
    tensors: list[list[StoredTensor]] = [[] for _ in range(ranks)]

    def stored(name: str, dtype: str, numel: int, rank: int) -> tuple[str, str]:
        unique = f"{name}.{sum(map(len, tensors))}"
        checksum = draw(_checksums)
        tensors[rank].append(StoredTensor(name=unique, dtype=dtype, numel=numel, checksum=checksum))
        return f"rank-{rank:05}.safetensors", unique

    def quantity(name: str, numel: int) -> StoredQuantity:
        dtype = draw(_dtypes)
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=2))})
        pieces = []
        for start, stop in pairwise(cuts):
            file, tensor = stored(name, dtype, stop - start, draw(st.integers(0, ranks - 1)))
            pieces.append(Piece(file=file, tensor=tensor, start=start, stop=stop))
        return StoredQuantity(name=name, dtype=dtype, pieces=tuple(draw(st.permutations(pieces))))

    def buffer(name: str) -> StoredBuffer:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        dtype, rank = draw(_dtypes), draw(st.integers(0, ranks - 1))
        file, tensor = stored(name, dtype, prod(shape), rank) if prod(shape) else ("", "")
        return StoredBuffer(
            name=name, dtype=dtype, shape=shape, ranks=(rank,), file=file, tensor=tensor
        )

    parameters = []
    offset = 0
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
        offset += draw(st.integers(0, 3))
        parameters.append(StoredParameter(name=name, offset=offset, shape=shape))
        offset += prod(shape)
    flat = StoredFlat(
        name=draw(_words),
        dtype=draw(_dtypes),
        is_trainable=True,
        parameters=tuple(parameters),
        quantities=(quantity(MASTER, offset), quantity("exp_avg", offset)),
    )
    buffers = tuple(buffer(name) for name in draw(st.lists(_words, max_size=2, unique=True)))
    open_step = draw(
        st.none() | st.builds(OpenStep, micro_steps=st.integers(1, 9), pieces=st.just(()))
    )
    return Manifest(
        step=draw(st.integers(0, 1 << 40)),
        seed=draw(st.none() | st.integers(0, (1 << 63) - 1)),
        origin=ORIGIN.model_copy(update={"world_size": ranks}),
        metrics=draw(st.dictionaries(_words, _floats, max_size=2)),
        flats=(flat,),
        buffers=buffers,
        scalars=tuple(
            draw(
                st.lists(
                    st.builds(StoredScalar, name=_words, dtype=_dtypes, values=st.tuples(_floats)),
                    unique_by=lambda scalar: scalar.name,
                )
            )
        ),
        groups=tuple(
            draw(
                st.lists(
                    st.builds(
                        StoredGroup,
                        name=_words,
                        algorithm=_words,
                        settings=st.dictionaries(_words, _settings, max_size=2),
                        parameters=st.lists(st.sampled_from(names), unique=True).map(tuple),
                    ),
                    max_size=2,
                    unique_by=lambda group: group.name,
                )
            )
        ),
        shared=draw(_json),
        ranks=tuple(RankState(rank=rank, state=draw(_json)) for rank in range(ranks)),
        open_step=open_step,
        config=draw(_json),
        files=tuple(
            StoredFile(
                name=f"rank-{rank:05}.safetensors",
                size_bytes=1000
                + sum(tensor.numel * ITEMSIZE_BYTES[tensor.dtype] for tensor in tensors[rank]),
                checksum=draw(_checksums),
                header_checksum=draw(_checksums),
                tensors=tuple(tensors[rank]),
            )
            for rank in range(ranks)
        ),
    )
