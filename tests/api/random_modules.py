"""Random small modules, as text, and what a script may change of each between steps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
from torch import nn

from zeroir.errors import UserError


@dataclass(frozen=True, slots=True)
class Feature:
    """Lines of a file, of ``__init__`` and of ``forward``, and changes as statements on ``net`` and the file ``f``.

    ``#`` stands for a number that no other feature of the module has.
    """

    forward: str
    changes: tuple[str, ...]
    init: str = "pass"
    file: str = ""


FEATURES: dict[str, Feature] = {
    "attribute": Feature(
        "y = y * self.a#", ("net.a# = 0.5", "net.a# = 2", "net.a# = -0.25"), "self.a# = 1.5"
    ),
    "flag": Feature(
        "y = y.tanh() if self.is# else y.sin()",
        ("net.is# = False", "net.is# = True"),
        "self.is# = True",
    ),
    "text": Feature(
        "y = {'relu': torch.relu, 'tanh': torch.tanh}[self.mode#](y)",
        ("net.mode# = 'tanh'", "net.mode# = 'relu'"),
        "self.mode# = 'relu'",
    ),
    "item of a list": Feature(
        "y = y + self.items#[1]",
        ("net.items#[1] = 3.0", "net.items#.append(1.0)", "net.items#.insert(0, 4.0)"),
        "self.items# = [1.0, 2.0]",
    ),
    "all items": Feature(
        "for each in self.all#:\n    y = y * each",
        ("net.all#.append(0.5)", "net.all#[0] = 2.0", "net.all#.clear()"),
        "self.all# = [1.0]",
    ),
    "item of a dict": Feature(
        "y = y - table#['gain']",
        ("f.table#['gain'] = 0.5", "f.table# = {'gain': 2.0}"),
        file="table# = {'gain': 1.0}",
    ),
    "object": Feature(
        "y = y * settings#.weight + settings#.shift",
        ("f.settings#.weight = 0.5", "f.settings#.shift = 1", "f.settings# = Settings#(2.0)"),
        file=(
            "@dataclass\nclass Settings#:\n    weight: float = 1.0\n    shift: float = 0.25\n\n"
            "settings# = Settings#()"
        ),
    ),
    "global": Feature(
        "y = y / (1 + scale#)", ("f.scale# = 0.5", "f.scale# = 3"), file="scale# = 1.0"
    ),
    "function": Feature(
        "y = squash#(y)",
        ("f.squash# = torch.sin", "f.squash# = lambda y: y * 0.5"),
        file="def squash#(y):\n    return y.tanh()",
    ),
    "function in an attribute": Feature(
        "y = self.f#(y)",
        ("net.f# = torch.sin", "net.f# = lambda y: y + 1"),
        "self.f# = torch.tanh",
    ),
    "closure": Feature(
        "y = shifted#(y)",
        ("f.change#(0.5)", "f.change#(-1.0)"),
        file=(
            "def pair#():\n    shift = 1.0\n    def shifted(y):\n        return y + shift\n"
            "    def change(value):\n        nonlocal shift\n        shift = value\n"
            "    return shifted, change\n\nshifted#, change# = pair#()"
        ),
    ),
    "class attribute": Feature(
        "y = y * Base#.slope",
        ("f.Base#.slope = 0.5",),
        file="class Base#:\n    slope = 1.25",
    ),
    "property": Feature(
        "y = y * self.inner#.doubled",
        ("net.inner#.value = 0.5",),
        "self.inner# = Inner#()",
        file="class Inner#:\n    value = 1.0\n    @property\n    def doubled(self):\n        return 2 * self.value",
    ),
    "computed name": Feature(
        "y = y * getattr(self, 'value' + '_#')",
        ("net.value_# = 0.5",),
        "self.value_# = 1.5",
    ),
    "tensor outside": Feature(
        "y = y + aim#",
        ("f.aim#.add_(1)", "f.aim#.zero_()", "f.aim# = torch.ones(3)"),
        file="aim# = torch.zeros(3)",
    ),
    "module outside": Feature(
        "y = y + guide#(x)",
        ("f.guide#.weight.data.mul_(2)", "f.guide#.bias.data.zero_()", "f.guide#.eval()"),
        file="guide# = nn.Linear(4, 3).requires_grad_(False)",
    ),
    "size": Feature(
        "y = y + torch.cat([y] * self.times#, 0).sum(0)",
        ("net.times# = 1", "net.times# = 3"),
        "self.times# = 2",
    ),
    "math": Feature(
        "y = y * math.exp(-self.rate#) + min(1.0, self.rate#)",
        ("net.rate# = 0.5", "net.rate# = 2.0"),
        "self.rate# = 0.25",
    ),
    "comparison": Feature(
        "y = y * self.step# if self.step# < 3 else y.sin()",
        ("net.step# += 1", "net.step# = 5"),
        "self.step# = 2",
    ),
    "counter": Feature(
        "self.calls# += 1", ("net.calls# = 0", "net.calls# += 10"), "self.calls# = 0"
    ),
    "submodule": Feature(
        "y = self.part#(y)",
        (
            "net.part#.append(nn.Tanh())",
            "net.part#[0] = nn.Sigmoid()",
            "net.part# = nn.Sequential()",
            "del net.part#[0]",
        ),
        "self.part# = nn.Sequential(nn.ReLU())",
    ),
    "setting of torch's": Feature(
        "y = self.soft#(y)",
        ("net.soft#.beta = 2.0", "net.soft#.threshold = 0.1"),
        "self.soft# = nn.Softplus()",
    ),
    "norm": Feature(
        "y = self.norm#(y)",
        ("net.norm#.eval()", "net.norm#.train()", "net.norm#.eps = 0.1"),
        "self.norm# = nn.BatchNorm1d(3, momentum=0.0)",
    ),
    "hook": Feature(
        "y = self.hooked#(y)",
        (
            "net.hooked#.register_forward_hook(lambda module, given, y: y * 0.5)",
            "net.hooked#.register_forward_pre_hook(lambda module, given: (given[0] + 1,))",
            "net.hooked#._forward_hooks.clear()",
        ),
        "self.hooked# = nn.Identity()",
    ),
    "frozen layer": Feature(
        "y = y + self.extra#(x)",
        (
            "net.extra#.requires_grad_(False)",
            "net.extra#.requires_grad_(True)",
            "net.extra# = nn.Linear(4, 3)",
        ),
        "self.extra# = nn.Linear(4, 3)",
    ),
    "stored": Feature(
        "self.last# = y.detach()\nseen#.append(y.detach().mean())",
        ("net.last# = None", "f.seen#.clear()"),
        "self.last# = None",
        "seen# = []",
    ),
    "partial": Feature(
        "y = scaled#(y)",
        (
            "f.scaled# = functools.partial(torch.mul, other=0.5)",
            "f.scaled#.keywords['other'] = 3.0",
        ),
        file="scaled# = functools.partial(torch.mul, other=2.0)",
    ),
    "partial in an attribute": Feature(
        "y = self.scaled#(y)",
        (
            "net.scaled#.keywords['other'] = 3.0",
            "net.scaled# = functools.partial(torch.mul, other=0.5)",
        ),
        "self.scaled# = functools.partial(torch.mul, other=2.0)",
    ),
    "hook that is a partial": Feature(
        "y = self.hooked#(y)",
        ("f.hook#.keywords['scale'] = 3.0",),
        "self.hooked# = nn.Identity()\nself.hooked#.register_forward_hook(hook#)",
        file=(
            "def scaled#(module, given, y, scale):\n    return y * scale\n\n"
            "hook# = functools.partial(scaled#, scale=2.0)"
        ),
    ),
    "numpy scalar": Feature(
        "y = y * float(self.n#)",
        ("net.n# = numpy.float64(0.5)", "net.n# = numpy.float32(3)"),
        "self.n# = numpy.float64(1.5)",
    ),
    "numpy array": Feature(
        "y = y * float(weights#[1])",
        ("f.weights#[1] = 0.5", "f.weights# = numpy.ones(2)"),
        file="weights# = numpy.array([1.0, 2.0])",
    ),
    "tensor of one number": Feature(
        "y = y * gain#",
        ("f.gain#.fill_(0.5)", "f.gain# = torch.tensor(3.0)"),
        file="gain# = torch.tensor(2.0)",
    ),
    "tensor in an object": Feature(
        "y = y + box#.aim",
        ("box#.aim.add_(1)", "box#.aim = torch.ones(3)"),
        file="class Box#:\n    def __init__(self):\n        self.aim = torch.zeros(3)\n\nbox# = Box#()",
    ),
    "tuple": Feature("y = y * self.pair#[0]", ("net.pair# = (0.5, 1)",), "self.pair# = (2.0, 1)"),
    "set": Feature(
        "y = y.tanh() if 'tanh' in self.names# else y",
        ("net.names#.clear()", "net.names#.add('sin')"),
        "self.names# = {'tanh'}",
    ),
    "deque": Feature(
        "y = y * sum(self.queue#)",
        ("net.queue#.append(0.5)", "net.queue#.clear()"),
        "self.queue# = collections.deque([1.0, 0.5], maxlen=2)",
    ),
    "enumeration": Feature(
        "y = y.tanh() if self.kind# is Kind#.TANH else y.sin()",
        ("net.kind# = f.Kind#.SIN",),
        "self.kind# = Kind#.TANH",
        file="class Kind#(enum.Enum):\n    TANH = 1\n    SIN = 2",
    ),
    "default argument": Feature(
        "y = weighted#(y)",
        ("f.weighted#.__defaults__ = (0.5, [1.0])", "f.factors#[0] = 3.0"),
        file="factors# = [1.0]\ndef weighted#(y, weight=2.0, factors=factors#):\n    return y * weight * factors[0]",
    ),
    "attribute of a function": Feature(
        "y = y * knob#.value",
        ("f.knob#.value = 0.5",),
        file="def knob#():\n    pass\n\nknob#.value = 2.0",
    ),
    "object that is called": Feature(
        "y = gate#(y)",
        ("f.gate#.bias = 0.5", "f.Gate#.__call__ = lambda self, y: y"),
        file=(
            "class Gate#:\n    def __init__(self):\n        self.bias = 1.0\n"
            "    def __call__(self, y):\n        return y + self.bias\n\ngate# = Gate#()"
        ),
    ),
    "method": Feature(
        "y = self.helper(y, #)",
        (
            "net.helper = lambda y, number: y * 0.5",
            "type(net).helper = lambda self, y, number: y * 3",
        ),
    ),
    "forward of a part": Feature(
        "y = self.part#(y)",
        ("net.part#.forward = lambda y: y * 0.5",),
        "self.part# = nn.Tanh()",
    ),
    "nested attribute": Feature(
        "y = self.nest#(y)",
        ("net.nest#.inner.slope = 0.5", "net.nest#.inner.sizes['a'] = 3"),
        "self.nest# = nn.Sequential()\nself.nest#.inner = Inner#()",
        file=(
            "class Inner#(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.slope, self.sizes = 2.0, {'a': 1}\n"
            "    def forward(self, y):\n        return y * self.slope + self.sizes['a']"
        ),
    ),
    "other name of a module": Feature(
        "y = y * config#.depth",
        ("f.config#.depth = 3.0", "f.config# = types.SimpleNamespace(depth=0.5)"),
        file="config# = types.SimpleNamespace(depth=2.0)",
    ),
    "cached function": Feature(
        "y = y * cached#(2) * base#['value']",
        ("f.base#['value'] = 0.5",),
        file="base# = {'value': 1.0}\n@functools.lru_cache\ndef cached#(n):\n    return n * 0.5",
    ),
    "static method": Feature(
        "y = Tools#.scaled(y)",
        ("f.Tools#.factor = 0.5", "f.Tools#.scaled = staticmethod(lambda y: y)"),
        file=(
            "class Tools#:\n    factor = 2.0\n    @staticmethod\n    def scaled(y):\n"
            "        return y * Tools#.factor"
        ),
    ),
    "dict of modules": Feature(
        "y = self.kinds#[self.chosen#](y)",
        ("net.chosen# = 'b'", "net.kinds#['a'] = nn.Sigmoid()"),
        "self.kinds# = nn.ModuleDict({'a': nn.Tanh(), 'b': nn.ReLU()})\nself.chosen# = 'a'",
    ),
    "order of modules": Feature(
        "for part in self.parts#:\n    y = part(y)",
        ("net.parts#[0], net.parts#[1] = net.parts#[1], net.parts#[0]",),
        "self.parts# = nn.ModuleList([nn.Tanh(), nn.ReLU()])",
    ),
    "dropout": Feature(
        "y = self.drop#(y)",
        ("net.drop#.p = 1.0", "net.drop#.eval()", "net.drop#.p = 0.0"),
        "self.drop# = nn.Dropout(0.0)",
    ),
    "mode": Feature(
        "y = y * 2 if self.training else y", ("net.eval()", "net.train()", "net.line.eval()")
    ),
    "count of a list": Feature(
        "y = y * len(self.seen#)",
        ("net.seen#.append(None)", "net.seen# = []"),
        "self.seen# = [1, 2]",
    ),
    "string in a format": Feature(
        "y = getattr(torch, f'{self.name#}h')(y)",
        ("net.name# = 'sin'",),
        "self.name# = 'tan'",
    ),
    "module that decides": Feature(
        "y = self.choice#(y) * self.choice#.gain",
        (
            "net.choice#.gain = 0.5",
            "net.choice#.inner = 2.0",
            "net.choice#.items.append(3.0)",
            "net.choice#.register_forward_hook(lambda _, __, y: y * 2)",
            "net.choice#.line.register_forward_hook(lambda _, __, y: y * 2)",
            "net.choice#.line.requires_grad_(False)",
            "net.choice#.eval()",
            "net.choice#.forward = lambda y: y * 0.5",
            "f.bias# = 0.5",
            "f.Choice#.slope = 3.0",
            "net.choice# = f.Choice#()",
        ),
        "self.choice# = Choice#()",
        file=(
            "bias# = 0.25\n\nclass Choice#(nn.Module):\n    slope = 2.0\n"
            "    def __init__(self):\n        super().__init__()\n        self.line = nn.Linear(3, 3)\n"
            "        self.gain, self.inner, self.items, self.calls = 1.0, 1.5, [1.0], 0\n"
            "    def forward(self, y):\n        self.calls += 1\n        if y.sum() > 1e6:\n            return y\n"
            "        y = self.line(y) * self.inner * self.slope * (2 if self.training else 1)\n"
            "        return y + bias# + sum(self.items)"
        ),
    ),
    "environment": Feature(
        "y = y.tanh() if os.environ.get('RANDOM_#') else y",
        ("os.environ['RANDOM_#'] = '1'", "os.environ.pop('RANDOM_#', None)"),
    ),
    "class attribute of a base": Feature(
        "y = self.child#(y)",
        ("f.Parent#.slope = 0.5", "f.Child#.slope = 3.0"),
        "self.child# = Child#()",
        file=(
            "class Parent#(nn.Module):\n    slope = 2.0\n"
            "    def forward(self, y):\n        return y * self.slope\n\n"
            "class Child#(Parent#):\n    pass"
        ),
    ),
    "attribute and global of one name": Feature(
        "y = y * self.both# * both#",
        ("net.both# = 0.5", "f.both# = 3.0"),
        "self.both# = 1.5",
        "both# = 2.0",
    ),
    "classes of one name": Feature(
        "y = self.twins#(y)",
        ("type(net.twins#[0]).slope = 0.5", "type(net.twins#[1]).slope = 3.0"),
        "self.twins# = nn.Sequential(twin#(), twin#())",
        file=(
            "def twin#():\n    class Twin(nn.Module):\n        slope = 2.0\n"
            "        def forward(self, y):\n            return y * self.slope\n\n    return Twin()"
        ),
    ),
    "hooks of two objects": Feature(
        "y = self.hooked#(y)",
        ("f.scalers#[0].scale = 0.5", "f.scalers#[1].scale = 3.0"),
        (
            "self.hooked# = nn.Identity()\nself.hooked#.register_forward_hook(scalers#[0].hook)\n"
            "self.hooked#.register_forward_hook(scalers#[1].hook)"
        ),
        file=(
            "class Scaler#:\n    scale = 2.0\n    def hook(self, module, given, y):\n"
            "        return y * self.scale\n\nscalers# = [Scaler#(), Scaler#()]"
        ),
    ),
    "criterion": Feature(
        "y = y + criterion#(y, torch.zeros_like(y))",
        ("f.criterion#.delta = 0.5", "f.criterion#.reduction = 'sum'", "f.criterion#.delta = 2"),
        file="criterion# = nn.HuberLoss(delta=1.0)",
    ),
    "teacher": Feature(
        "y = y + teachers#[0](x)",
        (
            "f.teachers#[0].gain = 0.5",
            "f.teachers#[0].is_on = False",
            "f.teachers#[0].drop.p = 1.0",
            "f.Teacher#.slope = 0.5",
            "f.offset# = 0.5",
            "f.Teacher#.forward = lambda self, x: self.line(x)",
            "f.teachers#[0].line.register_forward_hook(lambda _, __, y: y * 0.5)",
        ),
        file=(
            "offset# = 0.25\n\nclass Teacher#(nn.Module):\n    slope = 2.0\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.line, self.drop = nn.Linear(4, 3).requires_grad_(False), nn.Dropout(0.0)\n"
            "        self.gain, self.is_on = 1.5, True\n"
            "    def forward(self, x):\n        y = self.drop(self.line(x)) * self.gain * self.slope\n"
            "        return y + offset# if self.is_on else y\n\nteachers# = [Teacher#()]"
        ),
    ),
    "methods that Python calls": Feature(
        "y = y * config#['beta'] + len(config#) if config# else y * float(config#)",
        (
            "f.config#.items['beta'] = 0.5",
            "f.config#.items.update(gamma=1.0)",
            "f.config#.is_on = False",
            "f.config#.value = 3.0",
        ),
        file=(
            "class Config#:\n    def __init__(self):\n"
            "        self.items, self.is_on, self.value = {'beta': 1.5}, True, 2.0\n"
            "    def __getitem__(self, name):\n        return self.items[name]\n"
            "    def __len__(self):\n        return len(self.items)\n"
            "    def __bool__(self):\n        return self.is_on\n"
            "    def __float__(self):\n        return self.value\n\nconfig# = Config#()"
        ),
    ),
    "equal objects": Feature(
        "y = y * self.weighed#.value",
        ("net.weighed# = f.Weighed#(0.5)", "net.weighed#.value = 3.0"),
        "self.weighed# = Weighed#(1.5)",
        file=(
            "class Weighed#:\n    def __init__(self, value):\n        self.value = value\n"
            "    def __eq__(self, other):\n        return True\n    __hash__ = None"
        ),
    ),
    "import in forward": Feature(
        "import settings_of_# as settings\ny = y * settings.gain",
        ("sys.modules['settings_of_#'].gain = 0.5", "sys.modules['settings_of_#'].gain = 3.0"),
        file=(
            "sys.modules['settings_of_#'] = types.ModuleType('settings_of_#')\n"
            "vars(sys.modules['settings_of_#'])['gain'] = 1.5"
        ),
    ),
    "containers": Feature(
        "y = y * held#['x'] * many#[-1] * variable#.get() + next(iter(order#.values()))",
        (
            "f.held#['x'] = 0.5",
            "f.many#[-1] = 3.0",
            "f.variable#.set(0.25)",
            "f.order#['a'] = f.order#.pop('a')",
        ),
        file=(
            "held# = collections.UserDict(x=1.5)\nmany# = [1.0] * 10_001\n"
            "variable# = contextvars.ContextVar('variable', default=2.0)\norder# = {'a': 0.5, 'b': 1.5}"
        ),
    ),
    "text of a number": Feature(
        "y = y * {'0.1': 3.0}.get(f'{self.rate#:.1f}', 1.0)",
        ("net.rate# = 0.5", "net.rate# = 0.1", "net.rate# = 0.13", "net.rate# = 2.0"),
        "self.rate# = 1.0",
    ),
    "generator": Feature(
        "y = y * generator#.random()",
        ("f.generator#.random()",),
        file="generator# = random.Random(#)",
    ),
    "autocast": Feature(
        "y = y + (x @ line#)",
        ("stack.enter_context(torch.autocast('cpu', dtype=torch.bfloat16))", "stack.close()"),
        file="line# = torch.linspace(0.001, 1, 12).view(4, 3)",
    ),
    "old optimizer": Feature(
        "pass",
        (
            "require_refused(torch.optim.SGD(net.parameters(), 0.1).step)",
            "require_refused(lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0))",
        ),
    ),
    "none": Feature(
        "y = y if self.maybe# is None else y * self.maybe#",
        ("net.maybe# = 0.5", "net.maybe# = None", "net.maybe# = 2.0"),
        "self.maybe# = None",
    ),
}
"""By what a script may change."""

REFUSED: frozenset[str] = frozenset(("generator",))
"""The features that no program has."""

_HEAD = """
import collections
import contextlib
import contextvars
import enum
import functools
import math
import os
import random
import sys
import types
from dataclasses import dataclass

import numpy
import torch
from torch import nn

from tests.api.random_modules import require_refused

stack = contextlib.ExitStack()
"""

_NUMBERS = itertools.count()


def module_of(features: Sequence[str]) -> tuple[nn.Module, ModuleType, list[str]]:
    """Return a module with these features, its file as a Python module, and the statements that change them.

    Its forward takes f32[6, 4] and returns a loss.
    """
    files, inits, forwards, changes = [], [], [], list[str]()
    for number, name in enumerate(features):
        feature = FEATURES[name]
        files.append(feature.file.replace("#", str(number)))
        inits.append(feature.init.replace("#", str(number)))
        forwards.append(feature.forward.replace("#", str(number)))
        changes += [change.replace("#", str(number)) for change in feature.changes]

    def indented(parts: Sequence[str]) -> str:
        return "\n".join(f"        {line}" for part in parts for line in part.splitlines())

    text = (
        _HEAD
        + "\n\n".join(files)
        + "\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + "        self.line = nn.Linear(4, 3)\n"
        + indented(inits)
        + "\n\n    def helper(self, y, number):\n        return y * (1 + number)"
        + "\n\n    def forward(self, x):\n        y = self.line(x)\n"
        + indented(forwards)
        + "\n        return y.square().mean()\n"
    )
    name = f"random_module_{next(_NUMBERS)}"
    file = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"/random_modules/{name}.py", "exec"), vars(file))
    vars(file)["text"] = text
    net = file.Net()
    assert isinstance(net, nn.Module)
    return net, file, changes


def require_refused(use: Callable[[], object]) -> None:
    """Require that the use of a module without values raises UserError."""
    with pytest.raises(UserError):
        use()


def forget(file: ModuleType) -> None:
    """Leave the contexts of the file of a module, and forget it."""
    file.stack.close()
    sys.modules.pop(file.__name__, None)
