"""What a traced program computes is what eager PyTorch computes, bit for bit."""

from pathlib import Path

import pytest

from tests.support.eager import assert_equals_eager

MODELS = Path(__file__).parents[1] / "support" / "models"
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.extra()

    def extra(self):
        pass

def batch():
    return (torch.linspace(-1, 1, 12).reshape(3, 4),)

def model():
    return Model()

"""
SMALL = {
    "a buffer that is assigned anew": """
        self.count = self.count + 1
        return (self.layer(x) * self.count).mean()
    """,
    "slices that are written": """
        y = self.layer(x).clone()
        y[0] = 0
        y[:, 1] += x[:, 0]
        return y.square().mean()
    """,
    "constants made in forward": "return (self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).mean()",
    "vmap": "return torch.vmap(self.layer)(x).square().mean()",
    "a gradient in forward": """
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
        return g.square().mean()
    """,
    "two parameters that share one gradient": """
        return (x + self.one + self.two).square().sum()

    def extra(self):
        self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
    """,
    "batch norm with fixed statistics": """
        return F.batch_norm(self.layer(x), torch.zeros(4), torch.ones(4)).square().mean()
    """,
    "batch norm without statistics": """
        return (self.norm(self.layer(x)) * torch.arange(4)).square().mean()

    def extra(self):
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)
    """,
    "a list of layers that the root runs through twice": """
        for _ in range(2):
            for layer in self.layers:
                x = torch.relu(layer(x) + self.bias)
        return x.square().mean()

    def extra(self):
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.bias = nn.Parameter(torch.full((4,), 0.5))
    """,
    "dropout of channels": """
        y = F.dropout2d(self.layer(x)[None, :, :, None].expand(2, 3, 4, 5), 0.3)
        return y.square().mean()
    """,
    "attention with dropout and a mask": """
        q = self.layer(x)[None, None]
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.2).square().mean()
    """,
    "a module compiled by its author": """
        return self.compiled(x).square().mean()

    def extra(self):
        self.compiled = torch.compile(self.layer)
    """,
}


@pytest.mark.parametrize(
    ("precision", "micro_steps"), [("fp32", 1), ("bf16", 1), ("fp16", 1), ("bf16", 2)]
)
@pytest.mark.parametrize("model", [GPT, MODELS / "traps.py"], ids=["gpt", "traps"])
def test_loss_and_gradients(model: Path, precision: str, micro_steps: int) -> None:
    assert_equals_eager(model, precision=precision, micro_steps=micro_steps)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_llama(precision: str) -> None:
    pytest.importorskip("transformers")
    program = assert_equals_eager(MODELS / "llama.py", precision=precision)
    layers = [s.name for s in program.segments if s.name.startswith("llama_decoder_layer")]
    assert layers == ["llama_decoder_layer.forward", "llama_decoder_layer.backward"]


@pytest.mark.parametrize("name", SMALL)
def test_small_models(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    body = SMALL[name].strip("\n ")
    text = f"    def forward(self, x):\n        {body}\n"
    path.write_text(HEAD.replace("def batch", f"{text}\ndef batch"))
    assert_equals_eager(path)
    if "compiled" not in name:
        assert_equals_eager(path, precision="bf16")


@pytest.mark.parametrize(
    "patterns", [("norm",), ("blocks.1",), ("*.up.weight", "head"), ("tokens.weight",)]
)
def test_kept_fp32(patterns: tuple[str, ...]) -> None:
    program = assert_equals_eager(MODELS / "traps.py", precision="bf16", keep_fp32=patterns)
    kept = {slot.name for flat in program.flats if flat.name.endswith("fp32") for slot in flat.slots}
    assert {"norm.weight", "norm.bias"} <= kept
    assert len(kept) > 2 or patterns == ("norm",)
