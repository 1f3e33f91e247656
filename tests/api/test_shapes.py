"""Shapes as people give them: torch.export's forms, a text, a function of the model file; and what is refused."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

import zeroir
from examples import any_length
from zeroir.config.shapes import parse_shapes, shapes_text
from zeroir.errors import ModelWarning, UserError
from zeroir.frontend.source.given_shapes import given_shapes
from zeroir.torch_ops.batches import Batch

ROWS, LENGTH = Dim("rows", max=8), Dim("length", min=2, max=64)
TEXT = "ids: rows<=8, 2<=length<=64; mask: rows, length"
TOKENS = {"ids": torch.zeros(3, 4), "mask": torch.zeros(3, 4)}


def collection(batch: dict[str, Tensor]) -> ShapesCollection:
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in batch.values():
        shapes[tensor] = (ROWS, LENGTH)
    return shapes


@pytest.mark.parametrize(
    ("batch", "given", "text"),
    [
        (TOKENS, {"ids": (ROWS, LENGTH), "mask": {0: ROWS, 1: LENGTH}}, TEXT),
        (TOKENS, collection(TOKENS), TEXT),
        (TOKENS, {"ids": {-1: 8 * LENGTH}, "mask": None}, "ids: _, 2<=8*length<=64"),
        (
            TOKENS,
            {"ids": (None, 2 * LENGTH - 1), "mask": (ROWS + 1, LENGTH)},
            "ids: _, 2*length-1; mask: rows+1<=8, 2<=length<=64",
        ),
        (torch.zeros(3, 4), (ROWS, 4), "0: rows<=8, 4"),
        ((torch.zeros(2), [torch.zeros(2, 3)]), (None, [(ROWS, Dim.STATIC)]), "1.0: rows<=8, _"),
    ],
)
def test_forms_of_torch_export(batch: Batch, given: object, text: str) -> None:
    assert shapes_text(given_shapes(given, batch)) == text
    assert shapes_text(parse_shapes(text)) == text


def test_examples_that_differ_make_dims() -> None:
    batch = {"ids": torch.zeros(3, 4), "lengths": torch.zeros(3), "scale": torch.zeros(2)}
    others = [
        {"ids": torch.zeros(5, 9), "lengths": torch.zeros(5), "scale": torch.zeros(2)},
        {"ids": torch.zeros(1, 4), "lengths": torch.zeros(1), "scale": torch.zeros(2)},
    ]
    text = "ids: dim_ids_0<=5, 4<=dim_ids_1<=9; lengths: dim_ids_0"
    assert shapes_text(given_shapes(others, batch)) == text
    deep = [{"k" * 99: (torch.zeros(size),)} for size in (2, 3)]
    (path,) = given_shapes(deep[1:], deep[0])
    assert parse_shapes(shapes_text(given_shapes(deep[1:], deep[0]))).keys() == {path}
    with pytest.raises(UserError, match="the same sizes"):
        given_shapes([batch], batch)
    with pytest.raises(UserError, match="other tensors"):
        given_shapes([{"ids": torch.zeros(5, 9)}], batch)


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"ids": (Dim("rows"), 4)}, "rows at axis 0 of ids has no largest value"),
        ({"ids": (Dim.AUTO, 4)}, "axis 0 of ids"),
        ({"ids": (ROWS - 1, 4)}, "'rows-1<=8' is less than 1 where rows is 1"),
        ({"ids": {5: ROWS}}, "axis 5 of ids"),
        ({"tokens": (ROWS,)}, "tokens"),
        (7, "7 at the top"),
        (
            {"ids": (ROWS, LENGTH), "mask": (Dim("rows", max=9), LENGTH)},
            "two ranges to the dim rows",
        ),
    ],
)
def test_shapes_that_fit_no_batch_are_refused(given: object, fact: str) -> None:
    with pytest.raises(UserError, match=re.escape(fact)):
        given_shapes(given, TOKENS)


def test_a_size_beside_a_dim_gives_the_bits_of_eager_pytorch() -> None:
    """As what belongs to each token but the first."""

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, scale = batch
        scaled: Tensor = net(x)[:, 1:].mean(2) * scale
        return scaled.square().mean()

    net = nn.Linear(4, 4)
    eager = copy.deepcopy(net)
    shapes = ((ROWS, LENGTH, 4), (ROWS, LENGTH - 1))
    batch = torch.ones(3, 5, 4), torch.ones(3, 4)
    compiled = zeroir.compile(net, batch, loss=loss, shapes=shapes, stage=0, optimizer="sgd", lr=0)
    engine = compiled.engine(self_check=False)
    for rows, length in ((2, 2), (8, 64), (5, 7)):
        batch = torch.randn(rows, length, 4), torch.randn(rows, length - 1)
        assert engine.step(batch).loss == loss(eager, batch)
    with pytest.raises(UserError, match="'0' gives length the value 7, and '1' 8"):
        engine.step((batch[0], torch.ones(5, 7)))


def test_an_error_in_the_shapes_of_a_file_names_its_line(tmp_path: Path) -> None:
    text = Path(any_length.__file__).read_text()
    body = text[
        text.index("    rows, length = Dim(") : text.index(
            "\n\n", text.index("rows, length = Dim(")
        )
    ]
    for wrong, fact in (
        ("    return 7", "7 at the top"),
        ("    return {'input_ids': (Dim('none', max=6), None)}", "cannot be called none"),
        ("    return {'input_ids': (None,) * 3}", "3 dimensions"),
    ):
        path = tmp_path / "wrong.py"
        path.write_text(text.replace(body, wrong))
        with pytest.raises(UserError, match=rf"wrong\.py:\d+: .*{fact}"):
            zeroir.compile(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ids",
        ": rows<=4",
        "ids: rows",
        "ids: rows<=4, 9<=rows",
        "ids: 0*rows<=4",
        "ids: 4<=x<=3",
        "a: b<=3; a: b",
        "ids: f32<=4",
        "ids: élan<=4",
        "ids: -2*rows<=4",
        "ids: rows+2*rows<=4",
    ],
)
def test_texts_that_are_no_shapes_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_shapes(text)


class Mean(nn.Module):
    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.line(self.decide(x)).square().mean()
        return loss


def _longer(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 5 else x


def _first(x: Tensor) -> Tensor:
    return x[:3]


def _later(x: Tensor) -> Tensor:
    return x[2:]


def _alone(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x


def _squeezed(x: Tensor) -> Tensor:
    return x.squeeze(0)


def _halved(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2]


def _fixed(x: Tensor) -> Tensor:
    return x + torch.zeros(3, 4)


def _counted(x: Tensor) -> Tensor:
    return x * [0.0, 1.0, 2.0, 3.0, 4.0][int(x.shape[0])]


@pytest.mark.parametrize("decide", [_fixed, _counted])
def test_code_for_one_size_alone_is_named(decide: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UserError, match=r"test_shapes\.py:\d+ .*rows = 3"):
        zeroir.compile(Mean(decide), torch.zeros(3, 4), shapes=(ROWS, 4))


def _third(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 3 else x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lets the sizes of the batch decide")
@pytest.mark.parametrize(("decide", "least"), [(_third, 4), (_halved, 1)])
def test_sizes_of_the_example_that_are_treated_apart_have_a_program_of_their_own(
    decide: Callable[[Tensor], Tensor], least: int
) -> None:
    compiled = zeroir.compile(Mean(decide), torch.zeros(3, 4), shapes=(ROWS, 4))
    assert [(dim.minimum, dim.maximum) for dim in compiled.program.dims] == [(least, 8)]
    engine = compiled.engine()
    for rows in (3, 5, 3, 2):
        batch = torch.full((rows, 4), float(rows))
        with torch.no_grad(), engine.gathered() as module:
            loss = module(batch).item()
        assert engine.step(batch).loss == loss
    engine.close()


def _spread(x: Tensor) -> Tensor:
    offsets = torch.arange(4)[None] + torch.zeros(1, 4)
    if x.shape[0] != offsets.shape[0]:
        offsets = offsets.expand(x.shape[0], -1)
    return x + offsets


@pytest.mark.parametrize(
    ("code", "text", "smallest"),
    [
        (_spread, None, 1),
        (_alone, "rows != 1", 2),
        (_squeezed, "rows != 1", 2),
        (lambda x: x if x.shape[0] >= 3 else x * 2, "rows >= 3", 3),
    ],
)
def test_a_size_of_1_is_left_out_where_it_computes_something_else(
    code: Callable[[Tensor], Tensor], text: str | None, smallest: int
) -> None:
    shapes = {"x": (ROWS, 4)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = zeroir.compile(Mean(code), {"x": torch.zeros(5, 4)}, shapes=shapes)
    notes = [str(w.message) for w in caught if issubclass(w.category, ModelWarning)]
    said = f"only where {text}: the dim rows is from {smallest} to 8"
    assert [said in note for note in notes] == ([] if text is None else [True])
    assert [dim.minimum for dim in program.program.dims] == [smallest]


def test_a_view_by_strides_of_any_size_compiles() -> None:
    def strided(x: Tensor) -> Tensor:
        return x.as_strided((x.shape[0] - 1, 4), (4, 1), 4)

    rows = Dim("rows", min=3, max=8)
    program = zeroir.compile(Mean(strided), torch.zeros(5, 4), shapes=(rows, 4))
    engine = program.engine()
    for count in (3, 8):
        assert engine.step(torch.randn(count, 4)).loss > 0
    engine.close()


@pytest.mark.parametrize(
    ("code", "rows", "example", "text", "ends"),
    [
        (_longer, ROWS, 3, "rows <= 5", (1, 5)),
        (_longer, ROWS, 7, "rows > 5", (6, 8)),
        (_first, ROWS, 6, "rows >= 3", (3, 8)),
        (lambda x: x if x.shape[0] >= 3 else x * 2, Dim("rows", min=2, max=8), 5, ">= 3", (3, 8)),
        (lambda x: _longer(_squeezed(x)), ROWS, 3, "rows != 1 and rows <= 5", (2, 5)),
        (lambda x: _longer(_spread(x)), ROWS, 3, "only where rows <= 5", (1, 5)),
    ],
)
def test_a_dim_is_narrowed_to_the_examples_side_of_a_decision(
    code: Callable[[Tensor], Tensor], rows: Dim, example: int, text: str, ends: tuple[int, int]
) -> None:
    said = (
        rf"test_shapes\.py:\d+ .*{re.escape(text)}: the dim rows is from {ends[0]} to {ends[1]}\."
    )
    with pytest.warns(ModelWarning, match=f"{said} An engine that is made in this script compiles"):
        compiled = zeroir.compile(Mean(code), torch.zeros(example, 4), shapes=(rows, 4))
    assert [(dim.minimum, dim.maximum) for dim in compiled.program.dims] == [ends]


def test_code_that_fits_only_larger_sizes_is_named() -> None:
    with pytest.raises(UserError, match=r"size rows-2, .*narrow the dims"):
        zeroir.compile(Mean(_later), torch.zeros(6, 4), shapes=(ROWS, 4))


def test_code_that_fits_only_smaller_sizes_narrows_their_dim() -> None:
    def code(x: Tensor) -> Tensor:
        return x + torch.linspace(0, 1, 6)[: x.shape[1]]

    shapes = (4, Dim("length", max=8), Dim("width", max=3))
    with pytest.warns(ModelWarning, match=r"test_shapes\.py:\d+ .*the dim length is from 1 to 6"):
        zeroir.compile(
            Mean(lambda x: code(x.sum(2))[..., None].expand(-1, -1, 4)),
            torch.zeros(4, 5, 2),
            shapes=shapes,
        )


def test_code_that_compares_two_dims_narrows_them() -> None:
    """An answer that follows from an earlier one, or from the example, is not that of all sizes."""

    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.line(x).sum(2)
            loss: Tensor = (x * 2 if x.shape[0] < x.shape[1] else x).square().mean()
            return loss

    length = Dim("length", min=4, max=99)
    with pytest.warns(ModelWarning, match=r"test_shapes\.py:\d+ .* only where rows < length"):
        compiled = zeroir.compile(Compares(), torch.zeros(3, 5, 4), shapes=(ROWS, length, 4))
    ends = {dim.name: (dim.minimum, dim.maximum) for dim in compiled.program.dims}
    assert ends == {"rows": (1, 3), "length": (4, 99)}


@pytest.mark.slow
def test_an_engine_takes_batches_within_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "any.zir"
    zeroir.compile(any_length.__file__, stage=2).save(path)
    program = zeroir.load(path)
    assert program.options.shapes == "input_ids: rows<=6, 2<=length<=64; labels: rows, length"
    engine = program.engine(model=any_length.__file__)
    for rows, length in ((6, 64), (1, 2), (3, 12), (2, 39)):
        assert engine.step(any_length.batch_of(rows, length)).loss > 0
        logits = engine.evaluate(any_length.batch_of(rows, length)).outputs
        assert isinstance(logits, Tensor)
        assert logits.shape == (rows, length, 50)
    tokens = any_length.batch_of(3, 12)
    for batch, fact in (
        (any_length.batch_of(7, 12), "rows from 1 to 6"),
        (any_length.batch_of(3, 1), "length from 2 to 64"),
        ({**tokens, "labels": tokens["labels"][:2]}, "gives rows the value 3, and 'labels' 2"),
    ):
        with pytest.raises(UserError, match=fact):
            engine.step(batch)
    assert engine.step(tokens).loss > 0
    engine.close()


@pytest.mark.slow
def test_micro_batches_of_other_shapes_run_unit_by_unit() -> None:
    """Evaluations in between, and calls for one micro-batch each, compute what they do without a group."""
    in_order, in_turn = (
        zeroir.compile(
            any_length.__file__,
            stage=0,
            micro_steps=zeroir.MicroSteps(count=2, order=order),
            lr=0.1,
        ).engine()
        for order in ("layer", "step")
    )
    for sizes in (((6, 64), (1, 2)), ((2, 9), (2, 9)), ((1, 2), (6, 64)), ((5, 7), (3, 40))):
        batches = [any_length.batch_of(*size, seed) for seed, size in enumerate(sizes)]
        expected = in_turn.step(batches)
        assert in_order.step(batches).loss == expected.loss
        for batch in batches:
            logits, same = (e.evaluate(batch).outputs for e in (in_order, in_turn))
            assert isinstance(logits, Tensor)
            assert isinstance(same, Tensor)
            assert torch.equal(logits, same)
        losses = [in_order.micro_step(batch) for batch in batches]
        assert in_order.update().loss == in_turn.step(batches).loss
        assert losses[0].loss != losses[1].loss
    own, other = in_order.full_parameters(), in_turn.full_parameters()
    assert all(torch.equal(value, other[name]) for name, value in own.items())
    with pytest.raises(UserError, match="rows from 1 to 6"):
        in_order.step([any_length.batch_of(3, 12), any_length.batch_of(7, 12)])
    in_order.close()
    in_turn.close()
