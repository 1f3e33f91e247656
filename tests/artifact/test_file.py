"""A .zir file is read back unchanged, or is refused with one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.programs import mlp
from zeroir import artifact as artifacts
from zeroir.artifact import SCHEMA_VERSION, Artifact
from zeroir.artifact.outputs import MAGIC, PROGRAM, require_writable, write_whole
from zeroir.config import CompileOptions, make_options
from zeroir.errors import UserError
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import Program

MAJOR, MINOR = SCHEMA_VERSION


def make(logical: Program | None = None, scheduled: Program | None = None) -> Artifact:
    logical = mlp(blocks=1) if logical is None else logical
    return Artifact(
        logical=logical,
        scheduled=scheduled or dataclasses.replace(logical, passes=("shard-optimizer",)),
        model_path="examples/gpt.py",
        model_sha256="0" * 64,
        torch_version="2.13.0",
        zeroir_version="0.1.0",
    )


def framed(body: object, major: int = MAJOR, minor: int = MINOR) -> bytes:
    """A file with a right envelope around any body."""
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    assert isinstance(packed, bytes)
    return artifacts.envelope(packed, (major, minor))


BYTES = artifacts.to_bytes(make())


def body_of_bytes() -> dict[str, object]:
    """The body of ``BYTES``, for tests that change it."""
    body = msgpack.unpackb(BYTES[20 + 32 :])
    assert isinstance(body, dict)
    return body


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_saved_artefact_is_loaded(tmp_path: Path, precision: str) -> None:
    artifact = make(mlp(precision=precision, micro_steps=2, clip=1.0, tied=True))
    path = tmp_path / "gpt.zir"
    artifacts.save(artifact, path)
    loaded = artifacts.load(path)
    assert loaded == artifact
    assert repr(loaded) == repr(artifact)
    assert loaded.passes == ("shard-optimizer",)


def test_torch_s_own_version_can_be_stored() -> None:
    import torch

    artifact = dataclasses.replace(make(), torch_version=torch.__version__)
    loaded = artifacts.from_bytes(artifacts.to_bytes(artifact))
    assert loaded == artifact
    assert type(loaded.torch_version) is str


def test_bytes_are_deterministic_and_stable_under_a_round_trip() -> None:
    assert artifacts.to_bytes(make()) == BYTES
    assert artifacts.to_bytes(artifacts.from_bytes(BYTES)) == BYTES


def test_the_digest_of_a_program_follows_its_contents() -> None:
    program = mlp(blocks=1)
    assert artifacts.program_digest(program) == artifacts.program_digest(mlp(blocks=1))
    changed = dataclasses.replace(
        program, options=WrittenOptions.of({**program.options.texts, "stage": "3"})
    )
    assert artifacts.program_digest(changed) != artifacts.program_digest(program)


def test_options_are_objects_between_files_and_keep_the_texts_of_theirs() -> None:
    """A file of an earlier version lacks options; it is written as it was read."""
    options = make_options({"world_size": 2, "stage": 2, "keep_fp32": ["norm", "head"]})
    few = dict(list(options.pairs)[3:])
    for written in (options, WrittenOptions.of(few)):
        program = dataclasses.replace(mlp(blocks=1), options=written)
        artifact = dataclasses.replace(make(), logical=program, scheduled=program)
        data = artifacts.to_bytes(artifact)
        read = artifacts.from_bytes(data).scheduled.options
        assert isinstance(read, CompileOptions)
        assert read.flat == options.flat
        assert read.pairs == written.pairs
        assert artifacts.to_bytes(artifacts.from_bytes(data)) == data


def test_a_wrong_option_of_a_file_is_refused() -> None:
    program = dataclasses.replace(mlp(blocks=1), options=WrittenOptions.of({"stage": "9"}))
    data = artifacts.to_bytes(dataclasses.replace(make(), logical=program))
    with pytest.raises(UserError, match=r"'gpt\.zir' has a wrong option: --stage is 9"):
        artifacts.from_bytes(data, "gpt.zir")


@given(st.integers(0, len(BYTES) - 1))
@examples(200)
def test_any_truncation_is_refused(length: int) -> None:
    with pytest.raises(UserError, match=r"cut off|not a zeroir program"):
        artifacts.from_bytes(BYTES[:length], "gpt.zir")


@given(st.integers(0, 8 * len(BYTES) - 1))
@examples(300)
def test_any_flipped_bit_is_refused(bit: int) -> None:
    damaged = bytearray(BYTES)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UserError, match=r"damaged|cut off|not a zeroir program"):
        artifacts.from_bytes(bytes(damaged), "gpt.zir")


def test_every_flipped_bit_of_the_envelope_is_refused() -> None:
    for bit in range(8 * 52):
        damaged = bytearray(BYTES)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UserError, match=r"damaged|cut off|not a zeroir program"):
            artifacts.from_bytes(bytes(damaged), "gpt.zir")


def nodes_of(body: dict[str, object]) -> list[dict[str, object]]:
    """The nodes of the scheduled program's first segment."""
    scheduled = body["scheduled"]
    assert isinstance(scheduled, dict)
    nodes = scheduled["segments"][0]["nodes"]
    assert isinstance(nodes, list)
    return nodes


def first_op(body: dict[str, object]) -> dict[str, object]:
    scheduled = body["scheduled"]
    assert isinstance(scheduled, dict)
    op = scheduled["sections"][0]["body"][0]
    assert isinstance(op, dict)
    return op


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.data())
@examples(200)
def test_a_wrong_body_in_a_right_envelope_is_refused_or_read(data: st.DataObject) -> None:
    body = body_of_bytes()
    spoilt: object = body
    while True:
        if isinstance(spoilt, dict) and spoilt and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(spoilt)))
            if isinstance(spoilt[key], dict | list) and data.draw(st.booleans()):
                spoilt = spoilt[key]
                continue
            spoilt[key] = data.draw(PLAIN)
        elif isinstance(spoilt, list) and spoilt:
            index = data.draw(st.integers(0, len(spoilt) - 1))
            if isinstance(spoilt[index], dict | list) and data.draw(st.booleans()):
                spoilt = spoilt[index]
                continue
            spoilt[index] = data.draw(PLAIN)
        break
    with contextlib.suppress(UserError):
        artifacts.from_bytes(framed(body), "gpt.zir")


@given(st.binary(max_size=64))
def test_random_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(UserError):
        artifacts.from_bytes(framed(body), "gpt.zir")


def deep(depth: int) -> list[object]:
    nested: list[object] = ["list", []]
    for _ in range(depth):
        nested = ["list", [nested]]
    return nested


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda body: body.update(colour=1), "object contains unknown field 'colour'"),
        (lambda body: body.pop("model_sha256"), "object missing required field 'model_sha256'"),
        (
            lambda body: first_op(body).update(type="Teleport"),
            r"invalid value 'Teleport' at scheduled\.sections\[0\]\.body\[0\]\.type",
        ),
        (
            lambda body: nodes_of(body)[0].update(op=7),
            r"expected 'str', got 'int' at scheduled\.segments\[0\]\.nodes\[0\]\.op",
        ),
        (
            lambda body: nodes_of(body)[0].update(args=[["tensor", b"bytes"]]),
            r"invalid value 'tensor' at scheduled\.segments\[0\]\.nodes\[0\]\.args\[0\]\[0\]",
        ),
        (lambda body: body.update({"\x1b[2J\u202e": 1}), r"unknown field '\\x1b\[2J\\u202e'"),
        (lambda body: nodes_of(body)[0].update(args=[deep(100)]), "nest more than 64 deep"),
        (lambda body: nodes_of(body)[0].update(flops=True), "expected 'int', got 'bool'"),
        (
            lambda body: nodes_of(body)[0].update(source="\x1b[2J"),
            r"the text '\\x1b\[2J' holds the control character U\+001B at scheduled\.segments",
        ),
        (lambda body: nodes_of(body)[0].update(args=["\u202ea"]), r"character U\+202E at"),
        (
            lambda body: body.update(model_path="x" * 200_000),
            r"200,000 characters, more than 100,000 at model_path",
        ),
        (lambda body: nodes_of(body)[0].update(op="aten.add_.Tensor"), "changes its argument"),
        (lambda body: nodes_of(body)[0].update(op="aten.__iadd__.Tensor"), "changes its argument"),
        (lambda body: nodes_of(body)[0].update(op="aten.from_file.default"), "not on the list"),
        (lambda body: nodes_of(body)[0].update(op="os.system"), "segment @.* calls 'os.system'"),
    ],
)
def test_unknown_parts_of_a_file_are_named(
    spoil: Callable[[dict[str, object]], object], expected: str
) -> None:
    body = body_of_bytes()
    spoil(body)
    with pytest.raises(UserError, match=expected) as caught:
        artifacts.from_bytes(framed(body), "gpt.zir")
    assert "compile it again" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [65, 900, 1_000_000])
def test_arguments_that_nest_without_end_are_refused(depth: int) -> None:
    text = "innermost"
    body = body_of_bytes()
    nodes_of(body)[0].update(args=[text])
    packed = msgpack.packb(body).replace(
        msgpack.packb(text), b"\x92\xa4list\x91" * depth + msgpack.packb(text)
    )
    with pytest.raises(UserError, match="its values nest more than 64 deep; compile it again"):
        artifacts.from_bytes(framed(packed), "gpt.zir")


def test_a_newer_minor_schema_is_read_where_its_fields_are_known() -> None:
    body = body_of_bytes()
    assert artifacts.from_bytes(framed(body, minor=MINOR + 1)) == make()
    body["colour"] = 1
    with pytest.raises(UserError, match=r"unknown field 'colour'; upgrade zeroir"):
        artifacts.from_bytes(framed(body, minor=MINOR + 1))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not a zeroir program"),
        (b"PK\x03\x04 a zip", "not a zeroir program"),
        (b"zeroir 1  stage=3\n", "the text of a program"),
        (MAGIC[:3], "cut off after 3 bytes"),
        (BYTES + b"\0", "damaged"),
        (framed({}, major=MAJOR + 1), "upgrade zeroir"),
        (framed({}, major=MAJOR - 1), "compile it again"),
        (framed(b"\xc1"), "not msgpack"),
        (framed(b"\x91" * 5000), "expected 'object', got 'array'"),
        (framed([1]), "expected 'object', got 'array'"),
    ],
)
def test_other_files_are_refused(data: bytes, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        artifacts.from_bytes(data, "gpt.zir")


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(UserError, match="'/dev/zero' is not a zeroir program"):
        artifacts.load("/dev/zero")


def test_no_byte_after_the_envelope_is_read(tmp_path: Path) -> None:
    endless = tmp_path / "endless.zir"
    os.mkfifo(endless)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), endless.open("wb") as pipe:
            pipe.write(BYTES)
            while True:
                pipe.write(bytes(1 << 20))

    with ThreadPoolExecutor() as pool:
        pool.submit(write)
        with pytest.raises(UserError, match="damaged"):
            artifacts.load(endless)


def test_an_announced_huge_body_is_refused() -> None:
    head = struct.pack(">8sHHQ", MAGIC, MAJOR, MINOR, 2**40)
    with pytest.raises(UserError, match=r"is damaged: it announces 1,099,511,627,776 more bytes"):
        artifacts.from_bytes(head + bytes(32), "gpt.zir")


def test_a_name_that_a_terminal_obeys_cannot_be_stored() -> None:
    artifact = dataclasses.replace(make(), model_path="gpt\x1b[31m.py")
    with pytest.raises(UserError, match=r"model_path cannot be stored: .* U\+001B; change"):
        artifacts.to_bytes(artifact)


def test_paths_that_cannot_be_used_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        artifacts.load(tmp_path / "missing.zir")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        artifacts.load(tmp_path)
    with pytest.raises(UserError, match="cannot be written: there is no folder"):
        artifacts.save(make(), tmp_path / "missing" / "gpt.zir")
    for path in (tmp_path, Path()):
        with pytest.raises(UserError, match="is a folder"):
            artifacts.save(make(), path)
    looped = tmp_path / "looped.zir"
    looped.symlink_to(looped)
    for path, reason in (
        (looped, "link to itself|symbolic links"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(UserError, match=f"cannot be written: .*({reason})"):
            artifacts.save(make(), path)
    assert looped.is_symlink()


def test_a_failed_save_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpt.zir"
    artifacts.save(make(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        artifacts.save(make(mlp(blocks=2)), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["gpt.zir"]


def test_a_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    artifacts.save(make(), tmp_path / "gpt.zir")
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for data in (MAGIC + b"new", MAGIC + b"newer"):
        require_writable(link, PROGRAM)
        write_whole(link, data, PROGRAM)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_bytes() == data
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    require_writable(pipe, PROGRAM)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        write_whole(pipe, b"all of it", PROGRAM)
        assert read.result() == b"all of it"
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
