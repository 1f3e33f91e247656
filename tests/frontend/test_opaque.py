"""Modules whose code runs as it is in a program, because it cannot be traced."""

from __future__ import annotations

import copy
import gc
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.support import deciding_modules
from tests.support.deciding_modules import Branch, Deciding
from tests.support.zygote import run_forked
from zeroir.api.checks.check import check_model
from zeroir.api.compiled import CompiledProgram
from zeroir.config import make_options
from zeroir.errors import ModelWarning, UserError
from zeroir.ir.segments.allowlist import OPAQUE_OPS
from zeroir.runtime.engine.engine import Engine
from zeroir.torch_ops.opaque import opaque_modules

FILE = Path(deciding_modules.__file__)
slow = partial(pytest.param, marks=pytest.mark.slow)
OPAQUE = {"branches.0", "branches.1", "drops.0", "drops.1", "drops.2", "turns", "selects"}


def compiled(module: nn.Module, batch: object, **options: object) -> CompiledProgram:
    given = {"optimizer": "sgd", "lr": 0.05, "world_size": 1, **options}
    with pytest.warns(ModelWarning, match="runs as it is"):
        return zeroir.compile(module, batch, **given)  # type: ignore[arg-type]


def engine_of(module: nn.Module, batch: object, **options: object) -> Engine:
    return compiled(module, batch, **options).engine(self_check=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 3},
        slow({"world_size": 2, "micro_steps": 3, "recompute": "branches.*"}),
        slow({"world_size": 2, "stage": 2, "precision": "bf16", "offload": "optimizer,parameters"}),
        slow({"world_size": 4, "stage": 1, "clip": 0.5}),
        slow({"world_size": 1, "stage": 0, "precision": "fp16"}),
    ],
    ids=["stage-3", "recomputed", "bf16-offloaded", "stage-1", "fp16"],
)
def test_what_decides_equals_eager_replicas(options: dict[str, object]) -> None:
    comparison = check_model(str(FILE), make_options(options), steps=4, seed=0)
    assert comparison.is_equal, comparison.differences
    assert re.search(
        r"\nTraced: root.pre.\nRuns as it is: branches.0, branches.1: .*deciding_modules.py:\d+ uses the values",
        str(comparison),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_micro_batches_side_by_side_equal_eager_replicas(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
from tests.support.deciding_modules import Branch, batch, batches

class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def model():
    return Net(nn.Linear(4, 8), Branch(), Branch(), nn.Linear(8, 1))
"""
    (tmp_path / "model.py").write_text(text)
    options = make_options({"world_size": 2, "micro_steps": 2, "order": "layer"})
    comparison = check_model(str(tmp_path / "model.py"), options, steps=3, seed=0)
    assert comparison.is_equal, comparison.differences


@pytest.mark.slow
def test_only_what_cannot_be_traced_runs_as_it_is() -> None:
    with pytest.warns(ModelWarning) as noted:
        made = zeroir.compile(str(FILE), world_size=2)
    program = made.program
    assert opaque_modules(program.segments).keys() == OPAQUE
    listed = made.summary()["opaque"]
    assert {module for code in listed for module in code["modules"]} == OPAQUE
    assert {unit for code in listed for unit in code["units"]} >= {"branches.0", "root.post"}
    assert re.search(
        r"runs as it is +branches.0 branches.1: .*\n.*deciding_modules.py:\d+ uses", str(made)
    )
    assert re.search(r"traced +root.pre\n", str(made))
    notes = [str(each.message) for each in noted]
    assert len(notes) == 4
    (branch,) = (note for note in notes if "branches.0 (and 1 more)" in note)
    assert "deciding_modules.py:" in branch
    assert "uses the values of a tensor" in branch
    # Blocks of one kind stay units, which are gathered one after the other.
    units = {flat.unit for flat in program.flats}
    assert units >= {"branches.0", "branches.1", "drops.0", "drops.1", "drops.2"}


def test_a_module_in_hand_is_as_eager_pytorch_has_it() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Branch() for _ in range(2))
            self.calls, self.scale = 0, 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = x.detach().mean()
            for branch in self.inner[: 1 + self.calls % 2]:
                x = branch(x) * self.scale
            return x if x.mean() > 0 else 2 * x

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), Counts(), nn.Linear(8, 1))
    plain = copy.deepcopy(module)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).square().mean()
        return y

    engine = engine_of(module, torch.zeros(5, 4), loss=loss)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        batch = torch.randn(5, 4, generator=generator)
        if step == 3:
            for each in (module, plain):
                each.get_submodule("1").scale = 0.5  # type: ignore[assignment]
        expected = loss(plain, batch)
        optimizer.zero_grad(set_to_none=False)
        expected.backward()  # type: ignore[no-untyped-call]
        for parameter in plain.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        optimizer.step()
        assert engine.step(batch).loss == expected.item()
        found, wanted = module.get_submodule("1"), plain.get_submodule("1")
        assert (found.calls, float(found.seen)) == (wanted.calls, float(wanted.seen))  # type: ignore[arg-type]
    engine.close()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name


def test_it_is_gathered_whole_where_units_are_inside() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if x.mean() > -1:
                    x = layer(x)
            return x

    model = nn.Sequential(Around(), nn.Linear(8, 1))

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).mean()
        return y

    program = compiled(model, torch.ones(2, 8), loss=loss, world_size=2).program
    assert opaque_modules(program.segments).keys() == {"0"}
    assert {flat.unit for flat in program.flats} >= {"0"}


@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_the_model_itself_runs_as_it_is_where_it_is_asked_to() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if x.sum() > -100 else x
            return x.square().mean()

    torch.manual_seed(0)
    module = Decides()
    plain = copy.deepcopy(module)
    with pytest.raises(UserError, match=r"test_opaque.py:\d+ uses the values of a tensor"):
        zeroir.compile(module, torch.ones(2, 4))
    engine = zeroir.compile(
        module,
        torch.ones(2, 4),
        units=zeroir.Units(opaque="root"),
        optimizer="sgd",
        lr=0.1,
        world_size=1,
    ).engine()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        batch = torch.randn(2, 4)
        expected = plain(batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert engine.step(batch).loss == expected.item()


@pytest.mark.slow
def test_none_refuses_as_patterns_choose() -> None:
    with pytest.raises(UserError, match=r"deciding_modules.py:\d+ uses the values of a tensor"):
        zeroir.compile(str(FILE), world_size=2, units=zeroir.Units(opaque="none"))
    with pytest.raises(UserError, match="--opaque tower matches no module"):
        zeroir.compile(str(FILE), world_size=2, units=zeroir.Units(opaque="tower"))
    with pytest.raises(UserError, match=r"deciding_modules.py:\d+ uses the values of a tensor"):
        zeroir.compile(str(FILE), world_size=2, units=zeroir.Units(opaque="branches.*"))
    pattern = "branches.*,drops.*,turns,selects,last"
    program = zeroir.compile(str(FILE), world_size=2, units=zeroir.Units(opaque=pattern)).program
    assert opaque_modules(program.segments).keys() == {*OPAQUE, "last"}


class Once(nn.Module):
    """Returns as many rows as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1000:
            self.get_buffer("count").add_(1)
        y: Tensor = self.layer(x[:1] if x.sum() < -1000 else x)
        return y


@pytest.mark.parametrize(
    ("fill", "sentence"),
    [
        (
            -1e6,
            r"test_opaque.py:\d+: The module 0, whose code runs as it is, returned tensors of float32\[1, 4\] where",
        ),
        (
            1e6,
            r"test_opaque.py:\d+: The module 0, whose code runs as it is, changed count in place",
        ),
    ],
)
def test_what_it_returns_otherwise_ends_the_step(fill: float, sentence: str) -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).square().mean()
        return y

    engine = engine_of(nn.Sequential(Once(), nn.Linear(4, 4)), torch.ones(3, 4), loss=loss)
    engine.step(torch.ones(3, 4))
    with pytest.raises(UserError, match=sentence):
        engine.step(torch.full((3, 4), fill))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_a_program_in_a_file_needs_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "deciding.zir"
    code = f"import zeroir; zeroir.compile({str(FILE)!r}, world_size=1).save({str(program)!r})"
    (tmp_path / "script.py").write_text(code)
    done = run_forked("script.py", (), tmp_path)
    assert done.returncode == 0, done.stderr
    batch = deciding_modules.batch()
    loss = zeroir.load(program).engine(self_check=False, model=str(FILE)).step(batch).loss
    assert loss == zeroir.compile(str(FILE), world_size=1).engine().step(batch).loss
    in_hand = compiled(Deciding(), batch)
    in_hand.save(program)
    # As in a process that captured no model; a capture puts back what a global of this file holds.
    calls = sys.modules["zeroir.torch_ops.opaque"]._CALLS
    for word in tuple(calls):
        monkeypatch.delitem(calls, word)
    with pytest.raises(UserError, match="which this process does not have"):
        zeroir.load(program).engine(model=Deciding())


class Pools(nn.Module):
    """Decides by a value, takes and returns sizes, and halves the length in two ways."""

    def __init__(self, *, is_rounded: bool = False) -> None:
        super().__init__()
        self.line, self.is_rounded = nn.Linear(4, 4), is_rounded

    def forward(self, x: Tensor, shape: torch.Size, rows: int) -> dict[str, object]:
        y = self.line(x) if x.sum() > -1000 else x
        assert shape == x.shape
        assert rows == len(x)
        pooled = y[:, ::2] if self.is_rounded else torch.cat([y, y.flip(1), y[:, :1]], 1)
        return {"y": pooled, "flat": y.flatten(0, 1), "n": 3 * y.shape[1], "shape": y.shape}


class Around(nn.Module):
    """Uses the sizes that an opaque module returns."""

    def __init__(self, *, is_rounded: bool = False) -> None:
        super().__init__()
        self.first, self.pools = nn.Linear(4, 4), Pools(is_rounded=is_rounded)

    def forward(self, x: Tensor) -> Tensor:
        found = self.pools(self.first(x), x.shape, x.shape[0])
        scale = torch.ones(found["n"]).sum() + torch.ones(found["shape"]).sum()
        y: Tensor = found["y"].square().mean() + (found["flat"] * scale).square().mean()
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_its_sizes_are_polynomials_of_dims() -> None:
    torch.manual_seed(0)
    module = Around()
    plain = copy.deepcopy(module)
    batch, dims = torch.randn(3, 5, 4), "0: rows<=6, 2<=length<=9, _"
    alike = zeroir.MicroSteps(mean_over="batches")
    made = compiled(module, batch, shapes=dims, lr=1e-4, micro_steps=alike)
    (node, *_) = (n for s in made.program.segments for n in s.nodes if n.op == OPAQUE_OPS[0])
    assert [str(kind.shape) for kind in node.results if kind is not None] == [
        "(rows, length*2+1, 4)",
        "(length*rows, 4)",
    ]
    engine = made.engine()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    for rows, length in ((3, 5), (1, 2), (6, 9), (2, 7)):
        batch = torch.randn(rows, length, 4)
        expected = plain(batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert engine.step(batch).loss == expected.item()
    engine.close()
    with pytest.raises(
        UserError,
        match=r"test_opaque.py:\d+: The module pools, .* no polynomial of dims \(\d+ at length = \d",
    ):
        zeroir.compile(Around(is_rounded=True), torch.ones(3, 5, 4), shapes=dims)


@pytest.mark.slow
def test_its_memory_is_planned_and_measured() -> None:
    class Holds(nn.Module):
        """Holds much only where a value is large."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.line(x)
            copies = [y * number for number in range(1 if x.sum() < 1000 else 2000)]
            return torch.stack(copies).sum(0)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).square().mean()
        return y

    for fill in (1.0, 100.0):
        made = compiled(nn.Sequential(Holds(), nn.Linear(4, 4)), torch.ones(64, 4), loss=loss)
        (code,) = made.summary()["opaque"]
        engine = made.engine()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModelWarning)
            engine.step(torch.full((64, 4), fill))
        engine.close()
        said = [str(each.message) for each in caught]
        (measured,) = made.summary()["opaque"]
        taken = measured["measured_forward_bytes"], measured["measured_backward_bytes"]
        assert None not in taken
        is_more = [
            figure > code[of]  # type: ignore[literal-required]
            for figure, of in zip(taken, ("forward_bytes", "backward_bytes"), strict=True)
        ]
        assert is_more == 2 * [fill > 1]
        assert len(said) == sum(is_more)
        if said:
            figures = (
                f"held {taken[0]:,} bytes .* while the program plans {code['forward_bytes']:,}:"
            )
            assert re.search(f"The code of 0 .* its forward {figures}", said[0])


def test_a_module_in_hand_is_not_kept_alive() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).square().mean()
        return y

    module = nn.Sequential(Branch(), nn.Linear(8, 1))
    made = weakref.ref(module)
    engine = engine_of(module, torch.ones(2, 8), loss=loss)
    engine.step(torch.ones(2, 8))
    engine.close()
    del engine, module
    gc.collect()
    assert made() is None


class Block(nn.Module):
    """Decides by a value, around a layer, and has numbers that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.scale, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.line(x) if x.sum() > -100 else x
        return y


class Reads(nn.Module):
    """Reads an attribute of an opaque module in code that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.block(x) * self.block.scale).square().mean()
        return y


def scale(net: nn.Module) -> None:
    net.get_submodule("block").scale = 3.0  # type: ignore[assignment]


def hook_around(net: nn.Module) -> None:
    net.get_submodule("block").register_forward_hook(lambda _, __, y: 2 * y)


def hook_inside(net: nn.Module) -> None:
    net.get_submodule("block.line").register_forward_hook(lambda _, __, y: 2 * y)


@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
@pytest.mark.parametrize("change", [scale, slow(hook_around), slow(hook_inside)])
def test_what_others_read_of_it_and_hooks_around_it_count(
    change: Callable[[nn.Module], None],
) -> None:
    batch = torch.ones(2, 4)
    net = Reads()
    engine = engine_of(net, batch, lr=0.0)
    engine.step(batch)
    change(net)
    found = [engine.step(batch).loss for _ in range(2)]
    engine.close()
    assert found == 2 * [net(batch).item()]
    assert net.block.calls == 4


@torch.library.custom_op("opaque_test::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


class Odd(nn.Module):
    """Calls an operator that changes its argument and a backward, ties a parameter three times, returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for line in self.lines:
            line.weight = self.lines[0].weight

    def forward(self, x: Tensor) -> dict[str, object]:
        with torch.enable_grad():
            scale = x.detach().clone().requires_grad_()
            scale.square().sum().backward()  # type: ignore[no-untyped-call]
        x = x * cast("Tensor", scale.grad)
        for line in self.lines:
            x = line(x).tanh()
        more = torch.zeros(4)
        bump(more)
        return {"y": x + more, "cache": iter(())}


class AroundOdd(nn.Module):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.odd, self.reads = Odd(), reads

    def forward(self, x: Tensor) -> Tensor:
        found = self.odd(x)
        y: Tensor = found["y"].square().mean()
        return y * len(found["cache"].__class__.__name__) if self.reads else y


@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_what_no_trace_holds_runs_as_it_is_and_objects_stay_outside() -> None:
    torch.manual_seed(0)
    module, batch = AroundOdd(), torch.randn(64, 4)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    engine = engine_of(module, batch, lr=0.5)
    for _ in range(3):
        expected = plain(batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert engine.step(batch).loss == expected.item()
    engine.close()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    with pytest.raises(UserError, match=r"The module odd, .* returns a tuple_iterator, but only"):
        zeroir.compile(AroundOdd(reads=True), batch)


class CallsAgain(torch.autograd.Function):
    """Keeps no activations: its backward calls the layer again, and adds the gradients of its parameters itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:  # noqa: ANN401 - torch's
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[object, ...]:  # noqa: ANN401 - torch's
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = sys.platform
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = CallsAgain.apply(x, self.layer)  # type: ignore[no-untyped-call]
        return y if self.kind == sys.platform else x


def test_gradients_that_the_code_adds_up_itself_count() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).square().mean()
        return y

    torch.manual_seed(0)
    batch = torch.randn(3, 4)
    module = nn.Sequential(nn.Linear(4, 4), Reversible(), nn.Linear(4, 1))
    with pytest.raises(UserError, match=r"test_opaque.py:\d+ cannot be traced: it calls backward"):
        zeroir.compile(module, batch, loss=loss)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    chosen = partial(zeroir.compile, loss=loss, optimizer="sgd", lr=0.5, world_size=1)
    engine = chosen(module, batch, units=zeroir.Units(opaque="1")).engine()
    for _ in range(3):
        expected = loss(plain, batch)
        optimizer.zero_grad()
        expected.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert engine.step(batch).loss == expected.item()
    engine.close()
    draws = nn.Sequential(nn.Linear(4, 4), Reversible(dropout=0.5))
    with pytest.raises(UserError, match=r"The module 1, .* draws random numbers in its backward"):
        chosen(draws, batch, units=zeroir.Units(opaque="1"))


def test_where_values_decide_how_many_rows_a_module_gets_the_one_around_it_runs_as_it_is() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branch()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.inner(x[x.sum(-1) > 0]).sum()
            return y

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = module(batch).square().mean()
        return y

    model = nn.Sequential(nn.Linear(8, 8), Picks())
    program = compiled(model, torch.ones(3, 8), loss=loss, shapes="0: 2<=rows<=6, _").program
    assert opaque_modules(program.segments).keys() == {"1"}


def test_a_loss_function_that_decides_runs_as_it_is_with_the_model(tmp_path: Path) -> None:
    file = tmp_path / "decides.py"
    file.write_text("""
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))

def batch():
    return torch.randn(6, 4)

def loss(model, batch):
    y = model(batch)
    return y.square().mean() if y.mean() > 0 else y.abs().mean()
""")
    with pytest.raises(UserError, match=r"decides.py:13 uses the values"):
        check_model(str(file), make_options({"opaque": "none"}), steps=1, seed=0)
    options = make_options({"opaque": "root", "world_size": 2})
    comparison = check_model(str(file), options, steps=3, seed=0)
    assert comparison.is_equal, comparison.differences
