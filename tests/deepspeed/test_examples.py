"""The examples of DeepSpeed's documentation, and the reference file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroir.config import has_effect, make_options
from zeroir.deepspeed import translate
from zeroir.errors import UserError

DATA = Path(__file__).parents[1] / "data"
EXAMPLES = json.loads((DATA / "deepspeed_examples.json").read_text())["examples"]


@pytest.mark.parametrize("example", EXAMPLES, ids=[item["page"] for item in EXAMPLES])
def test_an_example_is_translated_or_refused_by_name(example: dict[str, Any]) -> None:
    world_size, micro = example["world_size"], example["micro"]
    if "refused" in example:
        with pytest.raises(UserError) as caught:
            translate(example["config"], given={}, world_size=world_size, example_batch_size=micro)
        assert str(caught.value).startswith(f"{example['refused']} cannot be honoured: ")
        return
    result = translate(example["config"], given={}, world_size=world_size, example_batch_size=micro)
    assert result.micro_batch_size == micro
    assert result.options.items() >= example["options"].items()
    # They also go together.
    options = make_options({"world_size": world_size, **result.options})
    assert has_effect(options)


def test_every_key_of_an_example_is_honoured_or_noted() -> None:
    """A key that is neither the origin of an option nor in a note asks for the default."""
    example = next(item for item in EXAMPLES if "without its offload" in item["page"])
    result = translate(example["config"], given={}, world_size=2, example_batch_size=4)
    said = {*result.origins.values()}
    said |= {key for note in result.notes for key in note.partition(":")[0].split(", ")}
    keys = {f"zero_optimization.{key}" for key in example["config"]["zero_optimization"]}
    assert keys - said == {"zero_optimization.stage3_max_live_parameters"}
