"""Models that torch's own samples showed to be refused or wrong, and a sample of those samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.conformance.judge import SampleOutcome, judge
from tools.conformance.samples import chosen, subjects
from zeroir.api.checks.check import check_model
from zeroir.config import make_options

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.none = nn.Parameter(torch.zeros(0, 8))
        self.empty = nn.Linear(0, 8)

def model():
    return Model()

def batch():
    return torch.randn(4, 8)

"""
FORWARDS = {
    "parameters without elements": """
        x = self.last(torch.cat([self.first(x), self.none]))
        return (x + self.empty(x[:, :0])).square().mean() + self.none.sum()
    """,
    "a loss over paths": """
        x = self.last(self.first(x)).reshape(8, 2, 2).log_softmax(-1)
        targets = torch.tensor([[1, 1, 1], [1, 1, 0]])
        return F.ctc_loss(x, targets, torch.tensor([8, 7]), torch.tensor([3, 2]))
    """,
    "bags of rows": """
        rows = torch.tensor([0, 3, 2, 1])
        return F.embedding_bag(rows, self.first(x), torch.tensor([0, 2])).square().mean()
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_equal_eager_replicas(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    forward = f"    def forward(self, x):{FORWARDS[name]}"
    path.write_text(HEAD.replace("\ndef model", f"\n{forward}\ndef model", 1))
    result = check_model(str(path), make_options({"stage": 3, "world_size": 2}), steps=2, seed=0)
    assert result.is_equal, str(result)


SUBJECTS = (
    "module nn.BatchNorm2d",
    "module nn.CTCLoss",
    "module nn.TransformerEncoder",
    "op addmm",
    "op as_strided",
    "op as_strided_copy",
    "op as_strided_scatter",
    "op bernoulli",
    "op nn.functional.fractional_max_pool2d",
    "op nn.functional.multilabel_margin_loss",
    "op nn.functional.rrelu",
    "op native_group_norm",
    "op normal",
    "op select_scatter",
    "op unsafe_chunk",
    "op unsafe_split",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_samples_of_torch_are_right(name: str) -> None:
    """``python -m tools.conformance`` judges all of them."""
    verdicts = [judge(sample) for sample in chosen(name, 1 if name.startswith("module") else 2)]
    assert verdicts
    for verdict in verdicts:
        assert verdict.outcome in (SampleOutcome.RIGHT, SampleOutcome.CLOSE, SampleOutcome.DRAWN), (
            verdict
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["op stack", "op unbind"])
def test_views_without_elements_begin_within_their_buffers(name: str) -> None:
    """Torch lets them begin beyond the end of what they are a view of."""
    verdicts = [judge(sample) for sample in chosen(name, 3)]
    assert [verdict.outcome for verdict in verdicts] == 3 * [SampleOutcome.RIGHT]


@pytest.mark.slow
def test_what_is_complex_is_refused_in_a_sentence() -> None:
    (verdict,) = (judge(sample) for sample in chosen("op linalg.eig", 1))
    assert verdict.outcome is SampleOutcome.REFUSED
    assert "makes a tensor of torch.complex64" in verdict.why


@pytest.mark.slow
def test_shapes_that_a_tensor_says_are_refused_as_such() -> None:
    refused = [judge(sample) for sample in chosen("op tensor_split", 5)]
    assert any("uses the values of a tensor" in verdict.why for verdict in refused)
    assert all("its data" not in verdict.why for verdict in refused)


@pytest.mark.slow
def test_torch_has_its_samples_where_they_are_looked_for() -> None:
    assert set(SUBJECTS) <= set(subjects())
