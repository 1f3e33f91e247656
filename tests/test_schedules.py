"""Schedules against DeepSpeed's own numbers, Hugging Face's functions, and as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.schedules import (
    DEEPSPEED_SCHEDULES,
    SCHEDULES,
    SchedulePoint,
    make_schedule,
    parse_schedule,
)

RECORDED = json.loads((Path(__file__).parent / "data" / "deepspeed_schedules.json").read_text())
CASES = RECORDED["cases"]


def test_every_schedule_of_deepspeed_has_cases() -> None:
    assert {case["type"] for case in CASES} == set(DEEPSPEED_SCHEDULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["type"])
def test_they_are_deepspeeds_bit_for_bit(case: dict[str, object]) -> None:
    """The recorded settings come from DeepSpeed's code itself; see the file."""
    name, params, steps = case["type"], case["params"], case["steps"]
    assert isinstance(name, str)
    assert isinstance(params, dict)
    assert isinstance(steps, list)
    schedule = make_schedule(name, params)
    settings = [
        schedule.settings(SchedulePoint(updates_done=step, lr=RECORDED["lr"], steps=1))
        for step in steps
    ]
    assert [item.lr for item in settings] == case["lrs"]
    betas = [None if item.betas is None else list(item.betas) for item in settings]
    assert betas == (case["betas"] or [None] * len(steps))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("constant{warmup=5}", "constant_with_warmup"),
        ("linear{warmup=5,total=40}", "linear"),
        ("linear{warmup=0,total=40}", "linear"),
        ("cosine{warmup=5,total=40}", "cosine"),
        ("cosine{warmup=5}", "cosine"),
    ],
)
def test_they_are_hugging_faces(text: str, name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.003)
    warmup = 0 if "warmup=0" in text else 5
    reference = get_scheduler(name, optimizer, warmup, 40)
    schedule = parse_schedule(text)
    for step in range(40):
        point = SchedulePoint(updates_done=step, lr=0.003, steps=40)
        assert schedule.settings(point).lr == optimizer.param_groups[0]["lr"], step
        optimizer.step()
        reference.step()


def test_the_least_factor_is_hugging_faces() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.003)
    reference = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 20, min_lr_rate=0.1)
    schedule = parse_schedule("cosine{warmup=4,total=20,minimum=0.1}")
    for step in range(20):
        point = SchedulePoint(updates_done=step, lr=0.003, steps=1)
        assert schedule.settings(point).lr == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-15
        )
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("text", ["linear{total=10,minimum=0.2}", "cosine{total=10,minimum=0.2}"])
def test_after_its_end_a_schedule_stays_at_its_minimum(text: str) -> None:
    schedule = parse_schedule(text)
    lrs = [
        schedule.settings(SchedulePoint(updates_done=step, lr=1.0, steps=1)).lr
        for step in range(9, 30)
    ]
    assert lrs[0] > 0.2
    assert lrs[1:] == pytest.approx([0.2] * 20)


@given(st.sampled_from(CASES))
def test_the_text_of_a_schedule_is_the_schedule(case: dict[str, object]) -> None:
    name, params = case["type"], case["params"]
    assert isinstance(name, str)
    assert isinstance(params, dict)
    schedule = make_schedule(name, params)
    assert parse_schedule(schedule.text()) == schedule
    options = make_options({"world_size": 2, "schedule": schedule.text()})
    assert options.schedule == schedule.text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cosin", "there is no schedule cosin; did you mean cosine? The schedules are constant,"),
        ("cosine{warmp=1}", "cosine has no option warmp; its options are warmup, total, minimum"),
        ("cosine{warmup=-1}", "warmup of cosine is -1, but should be greater than or equal to 0"),
        ("cosine{warmup}", "`warmup` should be option=value"),
        ("linear{warmup=1,warmup=2}", "`warmup=2` should be option=value, given once"),
        ("OneCycle{cycle_min_lr=0.1}", "OneCycle needs its option cycle_max_lr"),
        ("2", "a schedule is written name or name{option=value}, not `2`"),
        ("WarmupLR{warmup_type=square}", "should be 'log' or 'linear'"),
    ],
)
def test_a_wrong_text_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_schedule(text)
    assert words in str(caught.value)
    with pytest.raises(UserError) as caught:
        make_options({"world_size": 2, "schedule": text})
    assert str(caught.value).startswith(f"--schedule is {text}, but should be a schedule such as")
    assert words in str(caught.value)


def test_names_are_the_classes() -> None:
    assert all(kind.name == name for name, kind in SCHEDULES.items())
