"""Models of transformers compile for batches of any shape, and give the bits of eager PyTorch there."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["causal/llama", "masked/bert", "image/resnet"])
def test_a_model_of_transformers_takes_batches_of_any_shape(model: str, tmp_path: Path) -> None:
    from tools.survey_models import survey

    kind, name = model.split("/")
    assert survey(kind, name, tmp_path) == ("all sizes", "")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["causal/mamba2", "seq2seq/t5"])
def test_a_model_of_transformers_takes_batches_of_two_rows_and_more(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row a sum over strided elements may differ in the last bit on some processors."""
    from tools import tiny_models
    from tools.survey_models import survey

    monkeypatch.setattr(tiny_models, "SMALLEST", tiny_models.SMALLEST._replace(rows=2))
    kind, name = model.split("/")
    assert survey(kind, name, tmp_path) == ("all sizes", "")
