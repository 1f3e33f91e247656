"""Errors in the worker processes of a user's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zeroir.errors import UserError
from zeroir.runtime.training.users_code import in_users_code, naming_lost_workers, sentence_on


class Samples(Dataset[Tensor]):
    def __init__(self, fetch: Callable[[int], Tensor]) -> None:
        self.fetch = fetch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.fetch(index)


def fail(index: int) -> Tensor:
    raise KeyError(f"sample\n{index}")


def fail_in_lines(_: int) -> Tensor:
    raise ValueError("the first line\nthe second line")


def leave(_: int) -> Tensor:
    os._exit(9)


def first_batch(fetch: Callable[[int], Tensor]) -> Tensor:
    loader = DataLoader(
        Samples(fetch), num_workers=1, multiprocessing_context="fork", worker_init_fn=one_thread
    )
    return torch.cat(list(loader))


def one_thread(_: int) -> None:
    torch.set_num_threads(1)


def test_an_error_in_a_worker_is_a_sentence_with_the_line_of_the_users_code() -> None:
    with pytest.raises(UserError) as caught, in_users_code("batches()", " at step 3"):
        first_batch(fail)
    place = f"{Path(__file__).name}:{Samples.__getitem__.__code__.co_firstlineno + 1}"
    assert str(caught.value) == (
        f"batches() failed in a worker at step 3 ({place}): KeyError: 'sample\\n0'"
    )


def test_an_error_of_several_lines_in_a_worker_is_whole() -> None:
    with (
        pytest.raises(UserError, match=r"ValueError: the first line\s+the second line"),
        in_users_code("batches()"),
    ):
        first_batch(fail_in_lines)


@pytest.mark.slow
@pytest.mark.parametrize("context", [lambda: in_users_code("batches()"), naming_lost_workers])
def test_a_worker_that_ended_is_named_with_its_process_and_what_to_do(
    context: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    with (
        pytest.raises(UserError, match=r"^The DataLoader's worker process \d+ .*num_workers=0"),
        context(),
    ):
        first_batch(leave)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^other$"), naming_lost_workers():
        raise RuntimeError("other")


def test_without_a_line_of_the_users_code_only_the_reason_is_told() -> None:
    assert sentence_on("batches()", KeyError()) == "batches() failed: KeyError"
    error = ValueError("two\nlines")
    assert sentence_on("batches()", error, " at step 3") == (
        "batches() failed at step 3: ValueError: two lines"
    )
