"""Every refusal of a model begins with, or contains, file and line of the user's code."""

from __future__ import annotations

import ast
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor, nn

import zeroir
from tests.support.sources import nodes
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.frontend import trace
from zeroir.frontend.capture.loss_and_outputs import evaluated
from zeroir.frontend.source.module_source import source_of
from zeroir.frontend.source.source import LossFunction, WeightFunction

FRONTEND = Path(zeroir.__file__).parent / "frontend"
NOT_OF_A_MODEL = {
    # Of a file that cannot be read or executed, or lacks a function: tests/frontend/test_entry.py.
    "entry",
    # Of what changed between steps: tests/api/test_living.py.
    "watch",
    # Of the shapes of a batch: tests/api/test_shapes.py.
    "given_shapes", "shapes", "smallest_sizes",
    # Of a module that is gone, and of code around modules, which the reason replaces: test_opaque.py, test_own_code.py.
    "captured_call", "own_code",
    # Of options: tests/frontend/test_units.py, test_parameter_groups.py, test_opaque.py and test_bad_models.py.
    "choice", "parameter_groups", "precision", "tracing", "units",
}  # fmt: skip
"""The modules of the frontend whose refusals are of something else than a model."""

BATCH = (torch.ones(3, 4),)


class Net(nn.Module):
    """A layer whose output a function makes a loss of."""

    def __init__(self, forward: Callable[..., object] = lambda net, x: net.layer(x).mean()) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.table: Tensor | None = None
        self.plain = [torch.ones(4)]
        self.numbers = [1]
        self.body = forward

    def forward(self, *x: Tensor) -> object:
        return self.body(self, *x)


def changed(change: Callable[[Net], object]) -> nn.Module:
    """A net, changed; or what ``change`` returns, if that is a module."""
    net = Net()
    result = change(net)
    return result if isinstance(result, nn.Module) else net


def counting(net: Net, x: Tensor) -> object:
    net.calls += 1
    return net.layer(x).mean() * net.calls


def counting_in_a_list(net: Net, x: Tensor) -> object:
    net.numbers.append(1)
    return net.layer(x).mean()


def failing_later(net: Net, x: Tensor) -> object:
    if net.calls:
        raise RuntimeError("called again")
    net.calls += 1
    return net.layer(x).mean()


def adding_a_parameter(net: Net, x: Tensor) -> object:
    net.late = nn.Parameter(torch.ones(4))
    return net.layer(x).mean()


class Poisson(torch.autograd.Function):
    """Draws random numbers in its backward only."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, *grads: Tensor) -> Tensor:
        return grads[0] + torch.poisson(grads[0])


def applied(function: type[torch.autograd.Function], x: Tensor) -> Tensor:
    apply: Callable[[Tensor], Tensor] = function.apply
    return apply(x)


class Subclass(Tensor):
    """Computes in a way of its own."""

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise NotImplementedError


@torch.library.custom_op("lines::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x.clone()


noise.register_fake(torch.empty_like)


@torch.library.custom_op("lines::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x.clone()


scaled.register_fake(torch.empty_like)
zeroir.register_workspace(scaled, lambda *_: -1)


FORWARDS: tuple[Callable[..., object], ...] = (
    lambda net, x: net.layer(noise(net.layer(x))).mean(),
    lambda net, x: net.layer(x) if net.layer(x).sum() > 0 else x,
    lambda net, x: float(torch.tensor(x.tolist()).sum()) * net.layer(x).mean(),
    lambda net, x: net.layer(x.add_(1)).mean(),
    lambda net, x: (net.layer.weight.detach().add_(1), net.layer(x).mean())[1],
    lambda net, x: (net.layer(x) * net.plain[0]).mean(),
    lambda net, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (net.layer(x),)).mean(),
    lambda net, x: net.layer(x).mean() * (torch.distributed.get_rank() + 1 > 0),
    lambda net, x: (net.layer(x) @ x).mean(),
    lambda net, x: applied(Poisson, net.layer(x)).mean(),
    lambda net, x: torch.view_as_complex(net.layer(x).view(3, 2, 2)).abs().mean(),
    lambda net, x: net.layer(x).as_strided((4, 4), (4, 1), 4).mean(),
    lambda net, x: (scaled(x) + net.layer(x)).mean(),
    lambda net, x: net.layer(x),
    lambda *_: None,
    lambda net, x: net.layer(x).argmax(),
    lambda _, x: x.mean(),
    lambda _, x: x.mean().detach().requires_grad_(),
    lambda net, x: assert_array_equal(net.layer(x), 0),
    counting,
    counting_in_a_list,
    failing_later,
    adding_a_parameter,
)


DECIDING: tuple[Callable[..., object], ...] = (
    lambda net, x: net.layer(x[net.layer(x).mean(1) > 0]).mean(),
    lambda net, x: net.layer(net.layer(x) if net.layer(x).sum() > 0 else x).mean(),
    lambda net, x: net.layer(net.layer(x) if x.sum() > 0 else x).mean(),
)


def hooked_after_the_gradient(net: Net) -> None:
    register: Callable[..., object] = net.layer.weight.register_post_accumulate_grad_hook
    register(lambda _: None)


def with_a_used_row(net: Net) -> None:
    net.register_buffer("row", net.layer.weight.data[0])
    net.body = lambda net, x: (net.layer(x) * net.row).mean()


def tied(net: Net) -> None:
    net.other = net.layer
    net.other2 = nn.Linear(4, 4)
    net.other2.weight = net.layer.weight
    register: Callable[..., object] = net.layer.weight.register_hook
    register(lambda grad: grad * 2)


CHANGES: tuple[Callable[[Net], object], ...] = (
    lambda net: net.requires_grad_(False),
    lambda net: setattr(net, "layer", nn.LazyLinear(4)),
    lambda net: setattr(net, "layer", nn.DataParallel(net.layer)),
    lambda net: setattr(net, "layer", torch.jit.script(nn.Linear(4, 4))),
    lambda net: setattr(net, "norm", nn.SyncBatchNorm(4)),
    lambda net: net.layer.register_backward_hook(lambda *_: None),
    hooked_after_the_gradient,
    lambda net: net.register_buffer("mask", torch.eye(4).to_sparse()),
    lambda net: net.register_buffer("mask", torch.ones(4).as_subclass(Subclass)),
    lambda net: net.register_buffer("mask", torch.ones(4, dtype=torch.complex64)),
    lambda net: setattr(net.layer.weight, "ds_id", 1),
    lambda net: setattr(net.layer, "bias", nn.Parameter(net.layer.weight.data[0])),
    with_a_used_row,
    lambda net: setattr(net, "lock", threading.Lock()),
    tied,
    lambda _: nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
)


OUTPUTS = (torch.eye(4).to_sparse(), {2.5: torch.ones(4)}, {"logits": {"text"}})


def tracing(
    model: object,
    batch: object = BATCH,
    loss: LossFunction | None = None,
    weight: WeightFunction | None = None,
    frozen: object = None,
    opaque: str | None = None,
) -> None:
    source = source_of(model, batch, loss, weight, frozen)  # type: ignore[arg-type]
    trace(source, make_options({"world_size": 1, "opaque": opaque}))


def evaluating(outputs: object, *names: str) -> None:
    source = source_of(Net(), BATCH, lambda module, batch: (module(*batch), outputs), None)
    evaluated(source, Net(), BATCH, names)


def with_a_global_hook() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        tracing(Net())
    finally:
        handle.remove()


def in_autocast() -> None:
    with torch.autocast("cpu"):
        tracing(Net())


def refusals() -> Iterator[tuple[str, Callable[[], object]]]:
    """A name, and a call that must be refused."""
    for number, forward in enumerate(FORWARDS):
        yield f"forward {number}", partial(tracing, Net(forward), opaque="none")
    for number, forward in enumerate(DECIDING):
        yield f"decision {number}", partial(tracing, Net(forward))
    for number, change in enumerate(CHANGES):
        yield f"change {number}", partial(tracing, changed(change))
    for batch in ((), (2**63, torch.ones(3)), ("a" * 9999, torch.ones(3)), (b"x",)):
        yield f"batch {batch!r:.20}", partial(tracing, Net(), batch)
    complex_batch = (torch.ones(3, 4, dtype=torch.complex64),)
    yield "dtype of the batch", partial(tracing, Net(), complex_batch)
    yield "no module", partial(tracing, lambda: 3)
    yield "factory", partial(tracing, lambda: 1 // 0)
    yield "loss", partial(tracing, Net(), loss=lambda *_: "text")
    yield "loss of torch", partial(tracing, Net(), loss=nn.functional.mse_loss)
    yield "weight of nothing", partial(tracing, Net(), weight=lambda: 1.0)
    yield "other module", partial(tracing, Net(), loss=lambda m, b: m(*b) + OTHER(*b).mean())
    net = Net()
    for frozen in ("other", {"layer": OTHER}, {"a.b": OTHER}, {"other": 3}, {"other": net.layer}):
        yield f"frozen {frozen!r:.20}", partial(tracing, net, frozen=frozen)
    yield "frozen beside a factory", partial(tracing, Net, frozen=OTHER)
    for outputs in OUTPUTS:
        yield f"outputs {outputs!r:.20}", partial(evaluating, outputs)
    yield "missing output", partial(evaluating, {}, "logits")
    yield "global hook", with_a_global_hook
    yield "autocast", in_autocast
    yield "clock", partial(tracing, Net(), loss=lambda m, b: m(*b) * time.time())


OTHER = nn.Linear(4, 1)

PLACES = {"source", "line", "place", "self._place(node)", "capitalised(source.place_of(error))"}
"""What a sentence begins with that has the line in it, as written in the frontend."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_refusal_of_a_model_names_a_line() -> None:
    """Each statement of the frontend that refuses a model begins with the line, or is executed by one of the cases."""
    unreached = statements()
    assert len(unreached) > 30
    for name, call in refusals():
        with pytest.raises(UserError) as caught:
            call()
        assert re.search(r"\btest_refusal_lines\.py:\d+\b", str(caught.value)), (name, caught.value)
        lines = {
            (Path(frame.f_code.co_filename).name, number)
            for frame, number in traceback.walk_tb(caught.value.__traceback__)
        }
        unreached -= {(file, at) for file, at in unreached if lines & {(file, n) for n in at}}
    assert not unreached


def statements() -> set[tuple[str, range]]:
    """The statements that refuse a model with a sentence that need not begin with a line: files and lines."""
    return {
        (path.name, range(node.lineno, (node.end_lineno or 0) + 1))
        for path in FRONTEND.rglob("*.py")
        if path.stem not in NOT_OF_A_MODEL
        for node in nodes(path)
        if isinstance(node, ast.Raise) and refuses(node.exc)
    }


def refuses(raised: ast.expr | None) -> bool:
    match raised:
        case ast.Call(
            func=ast.Name(id="UserError" | "UnknownOutputError" | "NotInProgramsError"),
            args=[sentence],
        ):
            parts = sentence.values if isinstance(sentence, ast.JoinedStr) else [sentence]
            first = parts[0]
            return (
                not isinstance(first, ast.FormattedValue) or ast.unparse(first.value) not in PLACES
            )
        case ast.Name(id="refusal"):
            return True
        case _:
            return False


def test_a_line_of_a_package_comes_with_the_users() -> None:
    with pytest.raises(UserError) as caught:
        tracing(Net(lambda net, x: assert_array_equal(net.layer(x), 0)))
    own = r"\(called at [\w/]*test_refusal_lines\.py:\d+\)"
    assert re.search(rf"numpy/[\w/]+\.py:\d+ {own}", str(caught.value)), caught.value


def test_a_model_of_torchs_modules_has_the_line_that_compiles_it() -> None:
    here = traceback.extract_stack(limit=1)[0].lineno or 0
    with pytest.raises(UserError) as caught:
        zeroir.compile(nn.Sequential(nn.Linear(4, 4)), BATCH, world_size=1)
    assert f"test_refusal_lines.py:{here + 2}: The model's loss must" in str(caught.value)
