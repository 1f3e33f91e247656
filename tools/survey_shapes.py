"""Compile models of transformers for batches of any shape.

Each model has a tiny configuration. Its batches have 1 to 4 rows, and lengths from 2 to 24 or, where eager PyTorch
takes them, heights and widths of 64 to 128 pixels. Models that eager PyTorch cannot train, or that do not compile for
one shape, are left out. Of the others the record says which compile for all sizes, which for fewer, with a note, and
which are refused, each with the sentence. Each model has a process of its own, for a limited time.

    python -m tools.survey_shapes                   every model
    python -m tools.survey_shapes image             the models of a kind: causal, masked, seq2seq or image
    python -m tools.survey_shapes causal/llama      one model; a record keeps its verdicts on the others
    … --check                                       compare with eager replicas at random sizes, bit for bit, too
    … --sample 20                                   at most 20 of each kind, drawn at random
    … --record docs/records/shapes.json             write the record, too, after each model
    … --missing                                     only models that the record does not have
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypedDict, cast

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools import record_file
from tools.survey_causal_models import ABSENT, OF_ONE_TYPE, SIZES
from zeroir.api.checks.check import check_model
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.errors import ModelWarning, ZeroirError

KINDS: Mapping[str, Mapping[str, str | Sequence[str]]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
"""The class of each model type, by the kind of the model."""

MORE_SIZES: dict[str, object] = {
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
    **dict.fromkeys(("num_decoder_layers", "num_self_attends_per_block", "num_hidden_groups"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size"), 32),
    **dict.fromkeys(("hidden_size", "d_model", "dim", "embedding_size"), 32),
    **dict.fromkeys(("drop_path_rate", "attention_probs_dropout_prob", "dropout_rate"), 0.0),
    **dict.fromkeys(("dropout_prob", "pooler_dropout"), 0.0),
    "d_kv": 8,
    "image_size": 96,
    "mask_token_id": 3,
}
"""Tiny sizes beside those of causal models, for all of which lengths up to 24 have positions."""

MOST_NUMEL = 60_000_000
ROWS, LENGTHS, PATCHES, PATCH = (1, 4), (2, 24), (2, 4), 32
SECONDS = 240

VERDICTS = ("all sizes", "fewer sizes", "refused", "wrong", "left out")

Verdict = tuple[str, str]


class ShapesContent(TypedDict):
    """What the record holds beside its head."""

    head: list[str]
    rows: list[list[str]]
    models: dict[str, list[str]]


MODEL_FILE = """
from tools import survey_shapes

KIND, NAME, IS_SIZED = {kind!r}, {name!r}, {is_sized}

def model():
    return survey_shapes.tiny(KIND, NAME)

def batch():
    return survey_shapes.batch_of(KIND, (3, 7, 5, 3, 3))

def batches(rank, world_size, seed, start_step=0):
    return survey_shapes.batches(KIND, IS_SIZED, rank + 100 * seed)

def loss(module, batch):
    return module(**batch).loss
"""

Sizes = tuple[int, int, int, int, int]
"""Rows, length of the input, length of the target, patches of the height and of the width."""


def batch_of(kind: str, sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    """A batch of these sizes."""
    rows, length, target, height, width = sizes
    chance = torch.Generator().manual_seed(seed)
    if kind == "image":
        pixels = torch.randn(rows, 3, height * PATCH, width * PATCH, generator=chance)
        return {"pixel_values": pixels, "labels": torch.randint(2, (rows,), generator=chance)}
    ids = torch.randint(4, 64, (rows, length), generator=chance)
    if kind == "seq2seq":
        return {
            "input_ids": ids,
            "labels": torch.randint(4, 64, (rows, target), generator=chance),
        }
    return {"input_ids": ids, "labels": ids.clone()}


def batches(kind: str, is_sized: bool, seed: int) -> Iterator[dict[str, Tensor]]:
    """Batches of random sizes; without ``is_sized`` images have those of the example."""
    chance = random.Random(seed)
    while True:
        patches = [chance.randint(*PATCHES) if is_sized else 3 for _ in range(2)]
        sizes = (chance.randint(*ROWS), chance.randint(*LENGTHS), chance.randint(*LENGTHS))
        yield batch_of(kind, (*sizes, patches[0], patches[1]), chance.randint(0, 2**20))


def shapes_of(kind: str, is_sized: bool) -> str:
    """The shapes of the batches of a kind."""
    rows, length = f"rows<={ROWS[1]}", f"{LENGTHS[0]}<=length<={LENGTHS[1]}"
    if kind == "image":
        sides = [
            f"{PATCHES[0]}<={PATCH}*{side}<={PATCHES[1]}" if is_sized else "_"
            for side in ("height", "width")
        ]
        return f"pixel_values: {rows}, 3, {', '.join(sides)}; labels: rows"
    target = f"{LENGTHS[0]}<=target<={LENGTHS[1]}" if kind == "seq2seq" else "length"
    return f"input_ids: {rows}, {length}; labels: rows, {target}"


def config_of(kind: str, name: str) -> object:
    """The tiny configuration of a model type."""
    make = cast("Callable[..., object]", CONFIG_MAPPING[name])
    config = make()
    values = dict(vars(config))
    plain = {key for key, value in values.items() if isinstance(value, (int, float, bool))}
    absent = {key for key, value in values.items() if value is None}
    sizes = {**SIZES, **MORE_SIZES}
    given: dict[str, object] = {
        key: sizes[key] for key in sizes if key in plain | (absent & ABSENT)
    }
    for attribute, key in getattr(config, "attribute_map", {}).items():
        if attribute in sizes and key in plain and key not in given and key != "num_stages":
            given[key] = sizes[attribute]
    if "qk_rope_head_dim" in plain:
        # Latent attention derives its dimensions from these.
        given.pop("head_dim", None)
    for key, value in values.items():
        if key == "image_size" and isinstance(value, list | tuple):
            given[key] = (96, 96)
        elif key == "attention_window":
            given[key] = 4
        elif key == "depths" and key not in OF_ONE_TYPE.get(name, {}):
            given[key] = [1] * len(value)
    if values.keys() & {"hidden_sizes", "depths"}:
        # These follow from the sizes of the stages.
        given.pop("hidden_size", None)
        given.pop("num_layers", None)
    if kind == "seq2seq":
        given["decoder_start_token_id"] = 1
    if name == "mamba2":
        given["hidden_size"] = 16
    return make(**{**given, **OF_ONE_TYPE.get(name, {})}, use_cache=False)


def tiny(kind: str, name: str) -> torch.nn.Module:
    """The model of a type from its tiny configuration."""
    named = KINDS[kind][name]
    model_class = getattr(transformers, named if isinstance(named, str) else named[0])
    return cast("torch.nn.Module", model_class(config_of(kind, name)))


def survey(kind: str, name: str, folder: Path, is_checked: bool) -> Verdict:
    """The verdict on a model, one of ``VERDICTS``, and its reason."""
    try:
        with torch.device("meta"):
            numel = sum(parameter.numel() for parameter in tiny(kind, name).parameters())
        if numel > MOST_NUMEL:
            return "left out", f"its tiny configuration has {numel:,} elements"
        model = tiny(kind, name)
        for sizes in ((3, 7, 5, 3, 3), (2, LENGTHS[0], LENGTHS[1], 3, 3)):
            loss = model(**batch_of(kind, sizes)).loss
            if not loss.isfinite():
                return "left out", "its loss is not finite"
            loss.backward()
    except Exception as error:  # noqa: BLE001 - a configuration that does not fit a model raises anything
        return "left out", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    is_sized = kind == "image"
    if is_sized:
        try:
            for height, width in ((2, 4), (4, 2)):
                model(**batch_of(kind, (2, 0, 0, height, width))).loss.backward()
        except Exception:  # noqa: BLE001 - models of one size of images raise anything
            is_sized = False
    path = folder / f"{kind}_{name.replace('-', '_')}.py"
    path.write_text(MODEL_FILE.format(kind=kind, name=name, is_sized=is_sized))
    given = {"stage": 0, "world_size": 2}
    options = make_options({**given, "shapes": shapes_of(kind, is_sized)})
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModelWarning)
            compile_with(str(path), options)
    except ZeroirError as error:
        reason = _said(error, folder)
        try:
            compile_with(str(path), make_options(given))
        except ZeroirError as static:
            return "left out", f"does not compile for one shape: {_said(static, folder)}"
        return "refused", reason
    if is_checked:
        comparison = check_model(str(path), options, steps=2, seed=0)
        if not comparison.is_equal:
            return "wrong", str(comparison.differences[0])
    for warning in caught:
        if "lets the sizes of the batch decide" in str(warning.message):
            return "fewer sizes", _said(warning.message, folder)
    return "all sizes", "rows only" if kind == "image" and not is_sized else ""


def _said(error: object, folder: Path) -> str:
    return " ".join(str(error).split()).replace(f"{folder}/", "")[:400]


def _report(kind: str, name: str, folder: Path, is_checked: bool, end: Connection) -> None:
    torch.set_num_threads(1)
    try:
        verdict = survey(kind, name, folder, is_checked)
    except Exception as error:  # noqa: BLE001 - the record says what went wrong
        verdict = ("wrong", f"{type(error).__name__}: {error}"[:400])
    end.send(verdict)


def in_a_process(kind: str, name: str, folder: Path, is_checked: bool) -> Verdict:
    """The verdict on a model, from a process of its own."""
    forking = multiprocessing.get_context("fork")
    end, other_end = forking.Pipe(duplex=False)
    process = forking.Process(target=_report, args=(kind, name, folder, is_checked, other_end))
    process.start()
    other_end.close()
    try:
        if not end.poll(SECONDS):
            return "left out", f"takes more than {SECONDS} s"
        return cast("Verdict", end.recv())
    except EOFError:
        process.join()
        return "wrong", f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def chosen(named: Sequence[str], sample: int | None) -> list[tuple[str, str]]:
    """The models that the arguments name."""
    models = [
        (kind, name)
        for kind, names in KINDS.items()
        for name in sorted(names)
        if not named or kind in named or f"{kind}/{name}" in named
    ]
    if sample is None:
        return models
    return [
        model
        for kind in KINDS
        if (of_kind := [model for model in models if model[0] == kind])
        for model in sorted(random.Random(0).sample(of_kind, min(sample, len(of_kind))))
    ]


def main() -> int:
    """Survey the models and write the record."""
    parser = argparse.ArgumentParser(description="Survey transformers' models with dims.")
    record_file.add_option(parser)
    parser.add_argument("--missing", action="store_true", help="only models that the record lacks")
    parser.add_argument("--check", action="store_true", help="compare with eager replicas, too")
    parser.add_argument("--sample", type=int, help="at most this many of each kind")
    parser.add_argument("named", nargs="*", metavar="MODEL", help="only these, or these kinds")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kept = recorded(given.record) if given.missing or given.named or given.sample else {}
    verdicts = dict(kept)
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in chosen(given.named, given.sample):
            model = f"{kind}/{name}"
            if given.missing and model in kept:
                continue
            start = time.monotonic()
            verdict, reason = verdicts[model] = in_a_process(kind, name, Path(folder), given.check)
            seconds = time.monotonic() - start
            print(f"{model:32} {verdict:10} {seconds:5.1f} s  {reason[:240]}", flush=True)
            about = {"transformers": transformers.__version__}
            record_file.write(given.record, "survey_shapes", content_of(verdicts), about)
    content = content_of(verdicts)
    record_file.print_table(content["head"], content["rows"])
    return 1 if any(verdict == "wrong" for verdict, _ in verdicts.values()) else 0


def recorded(path: Path | None) -> dict[str, Verdict]:
    """The verdicts of a record; none where there is no file."""
    if path is None or not path.exists():
        return {}
    models = json.loads(path.read_text())["models"]
    return {model: (verdict, reason) for model, (verdict, reason) in models.items()}


def content_of(verdicts: Mapping[str, Verdict]) -> ShapesContent:
    """The content of the record: a table of the kinds, and the verdict on each model."""
    rows = []
    for kind in KINDS:
        of_kind = [
            verdict for model, (verdict, _) in verdicts.items() if model.startswith(f"{kind}/")
        ]
        every, fewer, refused, wrong, left_out = (of_kind.count(verdict) for verdict in VERDICTS)
        compiling = every + fewer + refused + wrong
        share = f"{(every + fewer) / compiling:.0%}" if compiling else ""
        rows.append(
            [kind, *map(str, (compiling, every, fewer, refused, wrong)), share, str(left_out)]
        )
    head = "kind|compile for one shape|for all sizes|for fewer|refused|wrong|share|left out"
    return {
        "head": head.split("|"),
        "rows": rows,
        "models": {model: [*verdict] for model, verdict in sorted(verdicts.items())},
    }


if __name__ == "__main__":
    sys.exit(main())
