"""Files of ``torch.save``, and pickles that would do something if they were loaded."""

from __future__ import annotations

import contextlib
import io
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.convert.support import imported_tensors
from zeroir.checkpoint.reading import read_manifest
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.convert.pickled_data import Made, UnreadablePickleError, read_pickle
from zeroir.errors import UserError

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def test_tensors_of_every_dtype_and_layout_keep_their_bits(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        str(dtype): torch.randint(0, 256, (24 * dtype.itemsize,), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        .reshape(4, 6)
        for dtype in DTYPES
        if dtype is not torch.bool
    }
    base = torch.arange(60.0).reshape(3, 4, 5)
    state |= {
        "bool": torch.tensor([True, False, True]),
        "transposed": base.mT,
        "slice": base[1:, ::2, 3],
        "scalar": torch.tensor(2.5),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "parameter": nn.Parameter(torch.ones(2, 2)),
        "empty": torch.empty(0, 3),
    }
    torch.save(state, tmp_path / "model.pt")
    import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
    tensors = imported_tensors(tmp_path / "checkpoint")
    manifest = read_manifest(str(tmp_path / "checkpoint"))
    shapes = {flat.name: flat.parameters[0].shape for flat in manifest.flats}
    assert shapes["empty"] == (0, 3)
    assert all(tensor.numel for file in manifest.files for tensor in file.tensors)
    for name, expected in state.items():
        if expected.numel():
            values = tensors[f"{name}.master"] if name in shapes else tensors[name]
            assert values.dtype == expected.dtype
            assert torch.equal(
                values.contiguous().reshape(-1).view(torch.uint8),
                expected.detach().contiguous().reshape(-1).view(torch.uint8),
            ), name


def test_one_storage_under_two_names_is_one_parameter(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

    torch.save({"model": Tied().state_dict(), "epoch": 3}, tmp_path / "model.pt")
    import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
    parameters = [
        (parameter.name, parameter.aliases)
        for flat in read_manifest(str(tmp_path / "checkpoint")).flats
        for parameter in flat.parameters
    ]
    assert parameters == [
        ("first.weight", ("second.weight",)),
        ("first.bias", ()),
        ("second.bias", ()),
    ]


def test_an_optimizer_that_knows_names_is_imported_and_another_is_left_out(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    for is_named in (True, False):
        optimizer = torch.optim.SGD(
            module.named_parameters() if is_named else module.parameters(), lr=0.1, momentum=0.9
        )
        torch.autograd.backward(module(torch.ones(1, 3)).sum())
        optimizer.step()
        path, checkpoint = tmp_path / f"{is_named}.pt", tmp_path / f"{is_named}"
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        report = import_checkpoint(path, str(checkpoint))
        if is_named:
            (group,) = read_manifest(str(checkpoint)).groups
            assert (group.algorithm, group.settings["lr"]) == ("momentum", 0.1)
            momentum = optimizer.state[module.weight]["momentum_buffer"]
            assert torch.equal(imported_tensors(checkpoint)["weight.momentum_buffer"], momentum)
        else:
            assert report.states == ()
            assert "numbers instead of the names" in " ".join(report.notes)


class Runs:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


class Evaluates:
    """One that evaluates an expression."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return eval, (f"open({str(self._marker)!r}, 'w').close()",)


class Rebuilt:
    """One that hides behind a function of torch that readers of weights know."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return torch._tensor._rebuild_from_type_v2, (
            os.system,
            torch.Tensor,
            (f"touch {self._marker}",),
            {},
        )


@pytest.mark.parametrize("kind", [Runs, Evaluates, Rebuilt])
@pytest.mark.parametrize("place", ["value", "key", "state", "deep", "model"])
def test_a_pickle_that_would_run_code_runs_none(
    kind: type[Runs | Evaluates | Rebuilt], place: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    harm = kind(marker)
    state: object = {"w": torch.ones(3), "harm": harm}
    match place:
        case "key":
            state = {"w": torch.ones(3), harm: 1}
        case "state":
            ordered = OrderedDict(w=torch.ones(3))
            ordered.__dict__["_metadata"] = harm
            state = ordered
        case "deep":
            state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": [{"x": (harm,)}]}}
        case "model":
            state = harm
    torch.save(state, tmp_path / "model.pt")
    if kind is Runs and place != "model":
        import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
        assert torch.equal(imported_tensors(tmp_path / "checkpoint")["w.master"], torch.ones(3))
    else:
        # A model that is no dictionary, or a tensor that is none, is refused.
        with contextlib.suppress(UserError):
            import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
    assert not marker.exists()
    # The file is one that does harm where it is loaded.
    with contextlib.suppress(AttributeError):
        torch.load(tmp_path / "model.pt", weights_only=False)
    assert marker.exists()


def test_metadata_of_dcp_that_would_run_code_runs_none(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    marker = tmp_path / "marker"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickled(Runs(marker)))
    with pytest.raises(UserError, match=r"\.metadata"):
        import_checkpoint(tmp_path / "dcp", str(tmp_path / "checkpoint"))
    assert not marker.exists()


def pickled(value: object, protocol: int = 2) -> bytes:
    """The pickle that torch writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_values_are_what_they_were(value: object, protocol: int) -> None:
    # Up to protocol 2 bytes are made by a call.
    if b"_codecs" not in (data := pickled(value, protocol)) and b"__builtin__" not in data:
        assert read_pickle(data) == value


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.binary(max_size=60), value=PLAIN, place=st.integers(0, 1 << 16))
@example(data=b"c\\_\nname\n.", value=None, place=0)  # the standard library warns of the escape
def test_any_bytes_are_data_or_refused(data: bytes, value: object, place: int) -> None:
    whole = pickled(value)
    cut = place % (len(whole) + 1)
    for damaged in (data, whole[:cut] + data + whole[cut:], whole[:cut]):
        try:
            read_pickle(damaged)
        except UnreadablePickleError:
            continue


@pytest.mark.slow
def test_deep_and_endless_pickles_are_read_or_refused() -> None:
    deep = b"(" * 200_000 + b"t" * 200_000 + b"."
    assert isinstance(read_pickle(deep), tuple)
    with pytest.raises(UnreadablePickleError):
        read_pickle(b"}" + deep[:-1] + b"K\x01s.")  # A deep tuple as a key: its hash has no end.
    cycle = read_pickle(b"]q\x00h\x00a.")
    assert isinstance(cycle, list)
    assert cycle[0] is cycle
    assert isinstance(read_pickle(b"cos\nsystem\n(S'true'\ntR."), Made)


@pytest.mark.slow
def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(40.0), "v": torch.ones(3, 5)[:, 1:]}, buffer)
    whole = buffer.getvalue()
    draws = random.Random(0)
    path = tmp_path / "model.pt"
    for number in range(400):
        damaged = bytearray(whole)
        if number % 4 == 0:
            del damaged[draws.randrange(len(whole)) :]
        else:
            damaged[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            import_checkpoint(path, str(tmp_path / f"{number}"), weights_only=True)


def test_compressed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(40)}, tmp_path / "model.pt")
    with (
        zipfile.ZipFile(tmp_path / "model.pt") as source,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    torch.save({"w": torch.ones(4)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.txt").write_text("no checkpoint at all")
    (tmp_path / "empty").write_bytes(b"")
    for name, problem in (
        ("packed.pt", "is compressed"),
        ("old.pt", "since PyTorch 1.6"),
        ("text.txt", "is not a file"),
        ("empty", "is empty"),
        ("missing", "There is no file or folder"),
    ):
        with pytest.raises(UserError, match=problem):
            import_checkpoint(tmp_path / name, str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()
