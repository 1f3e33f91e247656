"""Equal blocks are traced once, and the program is the same as if every block were traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroir.config import make_options
from zeroir.config.shapes import parse_shapes
from zeroir.frontend.capture.blocks import reuse
from zeroir.frontend.capture.blocks.graph import make_block_graph
from zeroir.frontend.capture.capture import capture
from zeroir.frontend.lowering import segments
from zeroir.frontend.lowering.tracing import program_of
from zeroir.frontend.source.entry import load_model_file
from zeroir.frontend.source.module_source import source_of
from zeroir.frontend.source.source import ModelSource
from zeroir.ir.segments.segment import Segment
from zeroir.ir.text import print_program
from zeroir.workspace import segments as workspace

MODELS = Path(__file__).parents[1] / "support" / "models"
NEVER = 10**9
LAYERS = 5
WIDTH = 8


class Block(nn.Module):
    """Pre-norm, a hidden layer, dropout, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(hidden), 0.1)


class Stack(nn.Module):
    """Blocks between an embedding and a loss."""

    def __init__(self, make: Callable[[int], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(make(at) for at in range(layers))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.run(self.embed(tokens)), tokens)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def model_file(make: Callable[[], nn.Module]) -> ModelSource:
    return source_of(make, (torch.arange(6).reshape(2, 3),), None, None)


def reused_blocks_of(
    file: ModelSource,
    precision: Literal["fp32", "bf16"] = "fp32",
    fewest: int = 3,
    *,
    evaluate: bool = False,
    shapes: str = "",
) -> tuple[str, ...]:
    """The blocks that were not traced one by one, after a comparison of the program with that of a full trace."""
    options = make_options({"world_size": 1, "precision": precision, "evaluate": evaluate})
    with_reuse, without = (
        capture(
            file,
            precision,
            (),
            evaluate=evaluate,
            fewest_equal_calls=calls,
            shapes=parse_shapes(shapes) if shapes else {},
        )
        for calls in (fewest, NEVER)
    )
    assert not without.reused_blocks
    assert print_program(program_of(with_reuse, options)) == print_program(
        program_of(without, options)
    )
    return with_reuse.reused_blocks


def names(*at: int) -> tuple[str, ...]:
    return tuple(f"blocks.{index}" for index in at)


@pytest.mark.slow
def test_equal_blocks_are_traced_once() -> None:
    assert reused_blocks_of(model_file(lambda: Stack(lambda _: Block()))) == names(*range(LAYERS))


@pytest.mark.slow
def test_equal_blocks_of_any_shape_are_traced_once() -> None:
    class Grouped(Block):
        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.shape
            mixed = super().forward(x.reshape(rows * length, width)).view(x.shape)
            return mixed + F.pad(x, (0, 0, 1, 0))[:, :length].mean(1, keepdim=True) / length

    file = model_file(lambda: Stack(lambda _: Grouped(), 3))
    shapes = "0: 2<=rows<=6, 2<=length<=9"
    assert reused_blocks_of(file, evaluate=True, shapes=shapes) == names(0, 1, 2)


@pytest.mark.slow
def test_a_dozen_equal_blocks_are_traced_built_and_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count: Counter[str] = Counter()

    def counted(what: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            count[what] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(reuse, "make_block_graph", counted("traced", make_block_graph))
    monkeypatch.setattr(segments, "Segment", counted("built", Segment))
    monkeypatch.setattr(
        workspace, "eager_workspace", counted("measured", workspace.eager_workspace)
    )
    monkeypatch.setattr(Segment, "digest", counted("hashed", Segment.digest))
    captured = capture(model_file(lambda: Stack(lambda _: Block(), 12)), "fp32", ())
    assert captured.reused_blocks == names(*range(12))
    program = program_of(captured, make_options({"world_size": 1}))
    # The forwards and backwards of the root before the blocks, of the blocks, and of the root after them; and the two
    # forwards of an evaluation that are not those of training.
    assert len(program.segments) == 8
    assert captured.evaluation is not None
    assert captured.evaluation.reused_blocks == captured.reused_blocks
    # Once to find equal segments, the evaluation's three, too, once among existing ones, and once for the fingerprint.
    assert count == {"traced": 2, "built": 9, "measured": 8, "hashed": 21}


@pytest.mark.slow
def test_few_blocks_are_traced_one_by_one() -> None:
    file = model_file(lambda: Stack(lambda _: Block()))
    assert capture(file, "fp32", (), fewest_equal_calls=LAYERS + 1).reused_blocks == ()


class Warmed(Stack):
    """Runs its blocks without gradients first."""

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = super().run(x)
        return super().run(x)


class Vectorised(Stack):
    """Maps a function over a dimension before its blocks: its tensors are not the recorded ones."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(torch.vmap(lambda row: row * 2)(x))


class Rescaled(Stack):
    """Changes a gradient between its blocks, in a hook that the recorded calls do not show."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            assert x.grad_fn is not None
            x.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        return x


class Packed(Stack):
    """Changes the tensors that are saved for the backward."""

    def run(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved):
            return super().run(x)


class Wide(Stack):
    """Makes a tensor under another default dtype, which the recorded calls do not show."""

    def run(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        ones = torch.ones(3)
        torch.set_default_dtype(torch.float32)
        return super().run(x * ones.sum().float())


class Changed(Stack):
    """Changes its blocks' results in place, also through a view."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 1
            x[..., 0] += 1
            x.transpose(0, 1).mul_(2)
        return x


class Penalised(Stack):
    """Computes a gradient in its forward."""

    def run(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
        return super().run(x + gradient)


@pytest.mark.slow
def test_the_models_code_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Noticing(Stack):
        def run(self, x: Tensor) -> Tensor:
            print("called")
            return super().run(x)

    source = model_file(lambda: Noticing(lambda _: Block()))
    captured = capture(source, "fp32", (), evaluate=False)
    assert captured.reused_blocks == names(*range(LAYERS))
    assert capsys.readouterr().out == "called\n"


class Indexed(Block):
    """Divides by its index, a constant that is not a parameter."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) / (1 + max(self.at, 1))
        return result


class Signed(Indexed):
    """Multiplies by a zero, whose sign depends on its index."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (-0.0 if self.at % 2 else 0.0)


class Counting(Block):
    """Computes something else at the fourth call of any block of this class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls = (type(self).calls + 1) % LAYERS
        result = super().forward(x)
        return result.relu() if type(self).calls == 4 else result


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: object, *grads: Tensor) -> Tensor:
        return grads[0] * 3


class OwnGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(Doubled.apply(x))  # type: ignore[no-untyped-call]
        return result


class Doubling(Stack):
    """Calls an autograd function of its own between its blocks."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Doubled.apply(block(x))  # type: ignore[no-untyped-call]
        return x


class InPlace(Block):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class Normed(Block):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(self.batch(x.transpose(1, 2)).transpose(1, 2))
        return result


class Stopped(Block):
    """Has a part without gradients, and a constant."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean() * torch.tensor(2.0)
        x[..., 0].detach()
        y = x.clone()
        y[..., 1:] += 1
        return super().forward(y / (scale + 1))


def stack_of(make: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(make)


class Collected(Stack):
    """Uses every block's result once more at the end: its gradient is a sum over uses, in their order."""

    def run(self, x: Tensor) -> Tensor:
        results = [x]
        for block in self.blocks:
            results.append(block(results[-1]))
        return torch.stack(results).sum(0)


class Shared(Stack):
    """Calls one block again and again."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


class Mean(Stack):
    """The last block's gradient is one number, expanded."""

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.sum() / tokens.numel()


class Hooked(Stack):
    """Changes the outputs of its blocks in hooks."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__(make)
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, y: y * 1.5)


class Notebook(nn.Module):
    """Stores a result in a list that the model reads later, as a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, notes: list[Tensor], bias: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.inner(x).chunk(2, -1)
        notes.append(first * 2)
        result = torch.cat([first, second], -1) + bias
        return result, result.amax(-1)


class Noting(Stack):
    """Its blocks share a parameter, and their stored results are used at the end."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__(make)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def run(self, x: Tensor) -> Tensor:
        notes: list[Tensor] = []
        for block in self.blocks:
            x, most = block(x, notes, self.bias)
            x = x + most.unsqueeze(-1)
        for note in notes[1:]:
            x = x + note.mean(-1, keepdim=True)
        return x


class Biased(Stack):
    """All blocks read one tensor, whose gradient is a sum over them."""

    def run(self, x: Tensor) -> Tensor:
        bias = self.embed.weight[:3] * 2
        for block in self.blocks:
            x = block(x, bias)
        return x


class WithBias(Block):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(x if bias is None else x + bias)


STACKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "indexed": (stack_of(Indexed), ()),
    "signed": (stack_of(Signed), names(0, 2, 4)),
    "counting": (stack_of(lambda _: Counting()), names(0, 1, 2, 4)),
    "own gradient": (stack_of(lambda _: OwnGradient()), ()),
    "own gradient between": (lambda: Doubling(lambda _: Block()), names(*range(LAYERS))),
    "in place": (stack_of(lambda _: InPlace()), ()),
    "running statistics": (stack_of(lambda _: Normed()), ()),
    "stopped": (stack_of(lambda _: Stopped()), names(*range(LAYERS))),
    "collected": (lambda: Collected(lambda _: Block()), ()),
    "biased": (lambda: Biased(lambda _: WithBias()), names(4)),
    "shared": (lambda: Shared(lambda _: Block()), names(*range(LAYERS)) * 2),
    "mean": (lambda: Mean(lambda _: Block()), names(0, 1, 2, 3)),
    "hooked": (lambda: Hooked(lambda _: Block()), names(*range(LAYERS))),
    "warmed": (lambda: Warmed(lambda _: Block()), names(1, 2, 3, 4) * 2),
    "vectorised": (lambda: Vectorised(lambda _: Block()), ()),
    "rescaled": (lambda: Rescaled(lambda _: Block()), ()),
    "packed": (lambda: Packed(lambda _: Block()), ()),
    "wide": (lambda: Wide(lambda _: Block()), ()),
    "changed": (lambda: Changed(lambda _: Block()), names(*range(LAYERS))),
    "penalised": (lambda: Penalised(lambda _: Block()), names(*range(LAYERS))),
    "noting": (lambda: Noting(lambda _: Notebook()), names(1, 2, 3, 4)),
}
FAST = {"rescaled"}


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STACKS],
)
def test_only_equal_block_calls_are_reused(name: str) -> None:
    make, expected = STACKS[name]
    assert reused_blocks_of(model_file(make)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((n, "bf16") for n in ("bert", "convnet", "gpt2", "llama", "t5", "translator")),
        # Without casts.
        ("convnet", "fp32"),
    ],
)
def test_reuse_leaves_the_programs_of_common_models_unchanged(
    name: str, precision: Literal["fp32", "bf16"]
) -> None:
    # Some with an evaluation, whose blocks are found as those of training are.
    evaluate = name in {"bert", "convnet", "t5"}
    file = load_model_file(str(MODELS / f"{name}.py"))
    reused_blocks_of(file, precision, 2, evaluate=evaluate)
