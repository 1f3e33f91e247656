"""A model that cannot be compiled is refused in one sentence with the line and a remedy, without a traceback."""

import re
from pathlib import Path

import pytest

from tests.support.eager import traced
from zeroir.errors import UserError

TEXT = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden, self.head = [torch.ones(4)], closure()

    def forward(self, x):
        {forward}

class Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.numpy())

def model():
    return {model}

def batch():
    return {batch}

def closure():
    head = nn.Linear(4, 4)
    return lambda x: head(x)
"""

FORWARDS = {
    "return self.layer(x).sum().item()": r"model.py:13 uses the values of a tensor to decide",
    "return x[x > 0].mean() + self.layer(x).mean()": r"model.py:13 uses the values of a tensor",
    "return (self.layer(x) + torch.poisson(x)).mean()": (
        r"model.py:13 uses the operator aten.poisson.default, which breaks the rule of randomness: it draws"
    ),
    "return None": r"forward must return the loss: .* it returned NoneType",
    "return {'value': self.layer(x).mean()}": r"it returned dict, which has none",
    "return {'loss': 1.0}": r"it returned dict whose loss is float",
    "return self.layer(x).argmax()": r"must be a floating-point number, but it is torch.int64",
    "return x.mean()": r"does not depend on any trainable parameter",
    "raise RuntimeError('one' + chr(10) + 'two')": r"cannot be traced at .*:13: RuntimeError: one two$",
    "return (self.layer(x) * self.hidden[0]).mean()": (
        r"model.py:13 uses a tensor that is not a parameter or buffer of the model: .* nn.ModuleList"
    ),
    "return self.head(self.layer(x)).mean()": (
        r"uses a tensor that is not a parameter or buffer of the model: .* an attribute of a module "
        r"\(self.head = head\), also where a function in a closure calls it"
    ),
    "loss = self.layer(x).mean(); loss.backward(); return loss": r":13 cannot be traced: forward calls backward\(\)",
    "return self.layer(x.double()).mean()": r":13: TypeError: linear mixes float64 with narrower",
    "return Numpy.apply(self.layer(x)).mean()": r"cannot be traced at .*model.py:18: RuntimeError: .numpy",
    "with torch.no_grad(): self.layer.bias.add_(1)\n        return self.layer(x).mean()": (
        r"model.py:13 changes the model's parameter layer.bias in place during forward"
    ),
}


def write(tmp_path: Path, **parts: str) -> Path:
    path = tmp_path / "model.py"
    given = {
        "forward": "return self.layer(x).mean()",
        "model": "Model()",
        "batch": "(torch.ones(3, 4),)",
    }
    text = TEXT
    for name, part in (given | parts).items():
        text = text.replace(f"{{{name}}}", part)
    path.write_text(text)
    return path


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        traced(path, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_bad_forward_is_refused(
    forward: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(write(tmp_path, forward=forward))
    assert re.search(FORWARDS[forward], sentence), sentence
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ("None", "has no tensor"),
        ("(3, 2**63)", "has no tensor"),
        ("{'x': {'y': b'text'}}", "its element x.y is of type bytes"),
        ("()", "has no tensor"),
        ("(torch.ones(3, 4), torch.ones(2))", "forward() takes 2 positional arguments but 3"),
        ("{'y': torch.ones(3, 4)}", "unexpected keyword argument 'y'"),
        ("(torch.ones(3, 4, dtype=torch.complex64),)", "input 0 is torch.complex64"),
        ("1 / 0", "batch() failed at"),
        ("{'a.b': torch.ones(1), 'a': {'b': torch.ones(1)}}", "two values have the path a.b"),
    ],
)
def test_a_bad_batch_is_refused(batch: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(write(tmp_path, batch=batch))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("3", "returned int; it must return a torch.nn.Module"),
        ("nn.Identity()", "has no trainable parameter: none of its parameters"),
        ("nn.Linear(3, 0, bias=False)", "has no trainable parameter"),
        ("torch.jit.script(nn.Linear(2, 3))", "The model is TorchScript"),
        ("nn.Sequential(torch.jit.trace(nn.Linear(2, 3), torch.ones(1, 2)))", "The module 0 of"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_model_is_refused(model: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(write(tmp_path, model=model))


@pytest.mark.slow
def test_flex_attention_is_refused_by_name(tmp_path: Path) -> None:
    path = write(
        tmp_path, forward="q = self.layer(x)[None, None]; return flex_attention(q, q, q).sum()"
    )
    text = path.read_text().replace(
        "from torch import nn",
        "from torch.nn.attention.flex_attention import flex_attention; from torch import nn",
    )
    path.write_text(text)
    assert re.search(
        r"model.py:13 uses a higher-order operator such as .* flex_attention", refusal(path)
    )


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    sentence = refusal(write(tmp_path), precision="bf16", keep_fp32=("norm*",))
    assert sentence == (
        "--keep-fp32 norm* matches no module or parameter of the model; names look like layer.bias."
    )
    assert "--units blocks.* matches no module" in refusal(write(tmp_path), units="blocks.*")
