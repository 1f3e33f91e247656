"""Models of transformers compile for batches of any shape, and give the bits of eager PyTorch there."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["causal/llama", "causal/mamba2", "masked/bert", "seq2seq/t5", "image/resnet"]
)
def test_a_model_of_transformers_takes_batches_of_any_shape(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools import tiny_models
    from tools.survey_models import survey

    # With one row the last bit may depend on the processor (docs/shapes.md, "Limits").
    smallest = tiny_models.SMALLEST._replace(rows=2)
    monkeypatch.setattr(tiny_models, "SMALLEST", smallest)
    kind, name = model.split("/")
    assert survey(kind, name, tmp_path) == ("all sizes", "")
