"""Compile models of transformers for batches of any shape, train them, and compare them with eager replicas.

Each model has a tiny configuration. Its batches have 1 to 4 rows, and 2 to 24 words or, where eager PyTorch takes
them, images of several heights and widths. It is trained at stage 3 on 2 ranks, each with batches of its own sizes,
and losses and parameters are compared bit for bit. Where its code decides by a size, an engine of one rank is
compared, which compiles several programs. A model that is refused is trained on batches of one shape, and if it is
still refused, the code of the whole model runs as it is. Models that eager PyTorch cannot train are left out. Each
model has a process of its own, for a limited time.

    python -m tools.survey_models                   every model
    python -m tools.survey_models image             the models of a kind: causal, masked, seq2seq, …
    python -m tools.survey_models causal/llama      one model
    … --one-shape                                   on batches of one shape alone
    … --experts                                     models with experts
    … --record docs/records/models.json             write the record, too, after each model; it keeps the other verdicts
    … --again refused,"one size"                    only models with these verdicts in the record
    … --missing                                     only models that the record does not have
    … --processes 2                                 as many models at once
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import zeroir
from tools import record_file
from tools.record_tables import VERDICTS_HEAD, rows_by_verdict
from tools.tiny_models import (
    EXAMPLE,
    KINDS,
    LARGEST,
    SMALLEST,
    BatchForm,
    UntrainableError,
    form_of,
    tiny,
)
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import BatchError, ModelWarning, ZeroirError

VERDICTS: Mapping[str, str] = {
    "all sizes": "for all sizes",
    "several programs": "in several programs",
    "one size": "for one",
    "as a whole": "with --opaque root",
    "different": "other bits",
    "refused": "refused",
    "left out": "left out",
}
"""The verdicts, and how a table calls their numbers. Those before ``refused`` compile for batches of one shape."""

OF_DIMS = ("all sizes", "several programs")
OF_ONE_SHAPE = (*OF_DIMS, "one size", "different")

DECISION = "the sizes of the batch decide"
MOST_NUMEL = 60_000_000
SECONDS = 400
LR, STEPS_OF_ENGINE = 0.01, 4
IS_OF_EXPERTS = re.compile(r"(num|n)_.*expert|moe_", re.IGNORECASE)

Verdict = tuple[str, str]
"""One of ``VERDICTS``, and the reason."""

MODEL_FILE = """
from itertools import count

from tools.tiny_models import BatchForm, tiny

FORM, VARIES = {form!r}, {varies!r}

def model():
    return tiny({kind!r}, {name!r})

def batch():
    return FORM.batch()

def batches(rank, world_size, seed, start_step=0):
    seed = 2 * seed + rank
    return FORM.batches(seed) if VARIES else (FORM.batch(seed=1000 * seed + i) for i in count())

def loss(module, batch):
    return FORM.loss(module, batch)
"""


HEAD = ["kind", "types", "surveyed", "compile for one shape", *VERDICTS.values(), "share"]


class Content(TypedDict):
    """What the record holds beside its head."""

    head: list[str]
    rows: list[list[str]]
    models: dict[str, list[str]]
    experts: list[str]


def survey(kind: str, name: str, folder: Path, *, is_one_shape: bool = False) -> Verdict:
    """The verdict on a model."""
    try:
        with torch.device("meta"):
            numel = sum(parameter.numel() for parameter in tiny(kind, name).parameters())
        if numel > MOST_NUMEL:
            return "left out", f"its tiny configuration has {numel:,} elements"
        form = form_of(kind, tiny(kind, name))
    except UntrainableError as error:
        return "left out", str(error)
    except Exception as error:  # noqa: BLE001 - a configuration that does not fit a model raises anything
        return "left out", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    if is_one_shape:
        return _verdict_on_one_shape(kind, name, form, folder, "equal", "")
    why = "rows only" if kind == "image" and not form.is_sized else ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModelWarning)
            try:
                return _judged(_difference(kind, name, form, folder, varies=True), "all sizes", why)
            except BatchError as error:
                # The program is for one side of a decision, which a note names.
                notes = [str(w.message) for w in caught if DECISION in str(w.message)]
                difference = _difference_of_an_engine(kind, name, form)
                said = _said(notes[0] if notes else error, folder)
                return _judged(difference, "several programs", said)
    except ZeroirError as error:
        reason = _said(error, folder)
    return _verdict_on_one_shape(kind, name, form, folder, "one size", reason)


def _verdict_on_one_shape(
    kind: str, name: str, form: BatchForm, folder: Path, verdict: str, reason: str
) -> Verdict:
    """The verdict, unless the model is refused or differs on batches of the example's shape, too."""
    try:
        difference = _difference(kind, name, form, folder, varies=False)
    except ZeroirError as error:
        refusal = _said(error, folder)
    else:
        return _judged(difference, verdict, reason)
    try:
        difference = _difference(kind, name, form, folder, varies=False, opaque="root")
    except ZeroirError:
        return "refused", refusal
    return _judged(difference, "as a whole", refusal)


def _judged(difference: str | None, verdict: str, reason: str) -> Verdict:
    """The verdict, if nothing differs from eager PyTorch."""
    return (verdict, reason) if difference is None else ("different", difference)


def _difference_of_an_engine(kind: str, name: str, form: BatchForm) -> str | None:
    """The first loss of an engine that differs from eager PyTorch's; None where there is none.

    The engine compiles a program for each side of the decisions that it meets.
    """
    torch.manual_seed(0)
    eager = tiny(kind, name)
    model = copy.deepcopy(eager)
    optimizer = torch.optim.SGD(eager.parameters(), lr=LR)
    engine = zeroir.compile(
        model,
        form.batch(),
        loss=form.loss,
        shapes=form.shapes,
        stage=0,
        optimizer="sgd",
        lr=LR,
        # Weights scale gradients and divide them again, which eager PyTorch does not.
        micro_steps=zeroir.MicroSteps(mean_over="batches"),
    ).engine()
    batches = form.batches(0)
    try:
        for sizes in (EXAMPLE, SMALLEST, LARGEST, *[None] * STEPS_OF_ENGINE):
            batch = next(batches) if sizes is None else form.batch(sizes)
            optimizer.zero_grad()
            loss = form.loss(eager, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found = float(engine.step(batch).loss)
            if found != loss:
                shape = [*next(iter(batch.values())).shape]
                return (
                    f"the loss of a batch of {shape} is {found:.9g}, and eager PyTorch's {loss:.9g}"
                )
    finally:
        engine.close()
    return None


def _difference(
    kind: str,
    name: str,
    form: BatchForm,
    folder: Path,
    *,
    varies: bool,
    opaque: str | None = None,
) -> str | None:
    """The first difference between a trained model and eager replicas; None where there is none."""
    path = folder / f"{kind}_{name.replace('-', '_')}{'' if varies else '_static'}.py"
    path.write_text(MODEL_FILE.format(kind=kind, name=name, form=form, varies=varies))
    given: dict[str, object] = {
        "stage": 3,
        "world_size": 2,
        "evaluate": False,
        "opaque": opaque,
    }
    options = make_options({**given, "shapes": form.shapes} if varies else given)
    comparison = check_model(str(path), options, steps=2, seed=0)
    return None if comparison.is_equal else str(comparison.differences[0])


def _said(error: object, folder: Path) -> str:
    return " ".join(str(error).split()).replace(f"{folder}/", "")[:400]


def _report(kind: str, name: str, folder: Path, is_one_shape: bool, end: Connection) -> None:
    torch.set_num_threads(1)
    try:
        verdict = survey(kind, name, folder, is_one_shape=is_one_shape)
    except Exception as error:  # noqa: BLE001 - the record says what went wrong
        verdict = ("different", f"{type(error).__name__}: {error}"[:400])
    end.send(verdict)


class _SurveyedModel(NamedTuple):
    model: str
    process: multiprocessing.process.BaseProcess
    since: float


def verdicts_of(
    models: Sequence[str], folder: Path, processes: int, *, is_one_shape: bool
) -> Iterator[tuple[str, Verdict, float]]:
    """The verdicts on models as they come, each with the seconds that it took. Each has a process of its own."""
    forking = multiprocessing.get_context("fork")
    rest, running = [*reversed(models)], dict[Connection, _SurveyedModel]()
    while rest or running:
        while rest and len(running) < processes:
            model = rest.pop()
            end, other_end = forking.Pipe(duplex=False)
            process: multiprocessing.process.BaseProcess = forking.Process(
                target=_report, args=(*model.split("/"), folder, is_one_shape, other_end)
            )
            process.start()
            other_end.close()
            running[end] = _SurveyedModel(model, process, time.monotonic())
        ready = wait([*running], timeout=1.0)
        for end, (model, process, since) in [*running.items()]:
            seconds = time.monotonic() - since
            verdict: Verdict = ("left out", f"takes more than {SECONDS} s")
            if end in ready:
                try:
                    verdict = cast("Verdict", end.recv())
                except EOFError:
                    process.join()
                    verdict = ("different", f"its process ended with {process.exitcode}")
            elif seconds < SECONDS:
                continue
            process.kill()
            process.join()
            del running[end]
            yield model, verdict, seconds


def main() -> int:
    """Survey the models and write the record."""
    parser = argparse.ArgumentParser(description="Survey the models of transformers.")
    record_file.add_option(parser)
    parser.add_argument("--missing", action="store_true", help="only models that the record lacks")
    parser.add_argument("--again", metavar="VERDICTS", help="only models with these in the record")
    parser.add_argument("--processes", type=int, default=1, help="how many models at once")
    parser.add_argument("--one-shape", action="store_true", help="on batches of one shape alone")
    parser.add_argument("--experts", action="store_true", help="only models with experts")
    parser.add_argument("named", nargs="*", metavar="MODEL", help="only these, or these kinds")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    verdicts = recorded(given.record)
    every = [f"{kind}/{name}" for kind, names in KINDS.items() for name in sorted(names)]
    # So a run that is cut off has a random sample of the models.
    random.Random(0).shuffle(every)
    models = [
        model
        for model in every
        if (not given.named or model.partition("/")[0] in given.named or model in given.named)
        and not (given.missing and model in verdicts)
        and not (given.experts and not has_experts(model))
        and (given.again is None or verdicts.get(model, ("",))[0] in given.again.split(","))
    ]
    # Earlier commands made the verdicts that stay.
    commands = record_file.commands_of(given.record) if {*verdicts} - {*models} else []
    about = {"transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for model, verdict, seconds in verdicts_of(
            models, Path(folder), given.processes, is_one_shape=given.one_shape
        ):
            verdicts[model] = verdict
            print(f"{model:32} {verdict[0]:16} {seconds:5.1f} s  {verdict[1][:300]}", flush=True)
            content = content_of(verdicts, is_one_shape=given.one_shape)
            record_file.write(given.record, "survey_models", content, about, after=commands)
    content = content_of(verdicts, is_one_shape=given.one_shape)
    record_file.print_table(content["head"], content["rows"])
    return 1 if any(verdict == "different" for verdict, _ in verdicts.values()) else 0


def recorded(path: Path | None) -> dict[str, Verdict]:
    """The verdicts of a record; none where there is no file."""
    if path is None or not path.exists():
        return {}
    models = json.loads(path.read_text())["models"]
    return {model: (verdict, reason) for model, (verdict, reason) in models.items()}


def content_of(verdicts: Mapping[str, Verdict], *, is_one_shape: bool) -> Content:
    """The content of the record: a table, the verdict on each model, and the models with experts."""
    return {
        "head": VERDICTS_HEAD if is_one_shape else HEAD,
        "rows": rows_by_verdict(verdicts) if is_one_shape else _rows_by_kind(verdicts),
        "models": {model: [*verdict] for model, verdict in sorted(verdicts.items())},
        "experts": [model for model in sorted(verdicts) if has_experts(model)],
    }


def _rows_by_kind(verdicts: Mapping[str, Verdict]) -> list[list[str]]:
    rows = []
    for kind, names in KINDS.items():
        of_kind = [v for model, (v, _) in verdicts.items() if model.startswith(f"{kind}/")]
        compiling, with_dims = (sum(map(of_kind.count, which)) for which in (OF_ONE_SHAPE, OF_DIMS))
        numbers = (len(names), len(of_kind), compiling, *map(of_kind.count, VERDICTS))
        rows.append([kind, *map(str, numbers), f"{with_dims / compiling:.0%}" if compiling else ""])
    total = [str(sum(map(int, column))) for column in list(zip(*rows, strict=True))[1:-1]]
    compiling, every, several = (int(total[HEAD.index(name) - 1]) for name in (HEAD[3], *HEAD[4:6]))
    return [*rows, ["all", *total, f"{(every + several) / compiling:.0%}" if compiling else ""]]


def has_experts(model: str) -> bool:
    """Whether the configuration of a model type has sizes of experts."""
    with suppress(Exception):  # a configuration without defaults has no tiny one either
        return any(map(IS_OF_EXPERTS.match, vars(CONFIG_MAPPING[model.partition("/")[2]]())))
    return False


if __name__ == "__main__":
    sys.exit(main())
