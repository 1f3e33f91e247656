"""A traced program and eager PyTorch compute the same bits."""

from pathlib import Path

import pytest

from tests.support.eager import assert_equals_eager
from zeroir.verify import verify

MODELS = Path(__file__).parents[1] / "support" / "models"
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TRAPS = MODELS / "traps.py"

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

from torch.utils.checkpoint import checkpoint

class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < ctx.bound), None

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
    "instance norm with and without statistics": """
        y = self.plain(self.layer(x).t()[None]).float()
        return (self.tracking(y) * torch.arange(3)).square().mean()

    def extra(self):
        self.plain = nn.InstanceNorm1d(4, affine=True)
        self.tracking = nn.InstanceNorm1d(4, track_running_stats=True)
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
    "a loss that is a parameter": """
        return self.one

    def extra(self):
        self.one = nn.Parameter(torch.ones(1))
    """,
    "a gradient that is one number": """
        return (x + self.one).sum() + self.two.t().sum()

    def extra(self):
        self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(2, 3))
    """,
    "images that lie in memory by channels": """
        y = self.layer(x)[:, None, :, None].expand(3, 2, 4, 5)
        return self.conv(y.contiguous(memory_format=torch.channels_last)).cos().mean()

    def extra(self):
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
    """,
    "one buffer under two names": """
        self.two.add_(1)
        return (self.layer(x) * self.one).mean()

    def extra(self):
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("two", self.one)
    """,
    "buffers that change places": """
        y = self.layer(x) * self.one
        self.one, self.two = self.two, self.one
        return (y * self.one).mean()

    def extra(self):
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("two", torch.linspace(0, 1, 4))
    """,
    "a concatenation with nothing": """
        nothing = torch.tensor([], dtype=x.dtype)
        return torch.cat([nothing, self.layer(x), nothing]).square().mean() + (nothing * 2).sum()
    """,
    "interpolation": """
        y = F.interpolate(self.layer(x)[None], scale_factor=2, mode="linear")
        return y.square().mean()
    """,
    "the inverse of a matrix": """
        y = self.layer(x).float()
        return torch.linalg.inv(y.t() @ y + torch.eye(4)).mean()
    """,
    "checks of a distribution": """
        return -torch.distributions.Normal(self.layer(x).float(), 1.0).log_prob(x.float()).mean()
    """,
    "devices by name": """
        table = torch.arange(4, device="cuda:1").to("cuda", torch.float32).cuda()
        return (self.layer(x.to("cuda")) * table.cpu()).mean()
    """,
    "a recurrent network with dropout": """
        return self.lstm(self.layer(x)[:, None])[0].square().mean()

    def extra(self):
        self.lstm = nn.LSTM(4, 3, 2, dropout=0.5)
    """,
    "a norm by the spectrum": """
        return self.normed(self.layer(x)).square().mean()

    def extra(self):
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    """,
    "a constructor that looks at values": """
        return (self.layer(x) * self.rates[1]).mean()

    def extra(self):
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
    """,
    "checkpoints of both kinds": """
        y = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(F.relu, checkpoint(self.layer, y, use_reentrant=False),
                          use_reentrant=False).mean()
    """,
    "a function with a backward of its own": """
        return Clip.apply(self.layer(x), 0.5).square().mean()
    """,
}


FAST = (TRAPS, "bf16", 3)
SLOW = [
    (GPT, "fp32", 1),
    (GPT, "bf16", 1),
    (GPT, "fp16", 1),
    (GPT, "bf16", 2),
    (TRAPS, "fp32", 1),
    (TRAPS, "bf16", 1),
    (TRAPS, "fp16", 1),
]


@pytest.mark.parametrize(
    ("model", "precision", "micro_steps"),
    [FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_loss_and_gradients(model: Path, precision: str, micro_steps: int) -> None:
    assert_equals_eager(model, precision=precision, micro_steps=micro_steps)


def write(tmp_path: Path, forward: str) -> Path:
    path = tmp_path / "model.py"
    body = forward.strip("\n ")
    text = f"    def forward(self, x):\n        {body}\n"
    path.write_text(HEAD.replace("def batch", f"{text}\ndef batch"))
    return path


OPERATORS = {
    "batch norm without statistics",
    "checks of a distribution",
    "dropout of channels",
    "instance norm with and without statistics",
    "interpolation",
    "the inverse of a matrix",
    "a recurrent network with dropout",
    "a norm by the spectrum",
}
"""Models that each exercise one operator; ``tests/torch_ops`` tests zeroir's own operators."""


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in OPERATORS else n for n in SMALL]
)
def test_small_models(name: str, precision: str, tmp_path: Path) -> None:
    report = verify(assert_equals_eager(write(tmp_path, SMALL[name]), precision=precision))
    assert report.is_valid, report.findings


@pytest.mark.slow
def test_modules_and_functions_compiled_by_their_author(tmp_path: Path) -> None:
    assert_equals_eager(
        write(
            tmp_path,
            """
        return self.tanh(self.compiled(x)).square().mean()

    @torch.compile
    def tanh(self, x):
        return torch.tanh(x)

    def extra(self):
        self.compiled = torch.compile(self.layer)
    """,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "patterns", [("*.up.weight", "head"), ("norm",), ("blocks.1",), ("tokens.weight",)]
)
def test_kept_fp32(patterns: tuple[str, ...]) -> None:
    program = assert_equals_eager(TRAPS, precision="bf16", keep_fp32=patterns, micro_steps=2)
    fp32_parameters = {
        slot.name for flat in program.flats if flat.name.endswith("fp32") for slot in flat.slots
    }
    assert {"norm.weight", "norm.bias"} <= fp32_parameters
    assert len(fp32_parameters) > 2 or patterns == ("norm",)
