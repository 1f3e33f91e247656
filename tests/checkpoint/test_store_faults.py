"""Whatever goes wrong while a checkpoint is saved to a store: none is lost, and none is seen by halves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.faulty_store import NEWEST, Fault, Kind, count_requests, trial
from tools.fault_checkpoint import draw


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_nothing_is_lost_and_nothing_half_visible(
    number: int, s3_bucket: str, s3_environment: Mapping[str, str]
) -> None:
    faults = draw(count_requests(s3_bucket), count=2 * len(Kind), seed=7)
    for place, fault in enumerate(faults[number::2]):
        outcome = trial(s3_bucket, f"trial-{place}", fault, s3_environment)
        assert not outcome.is_lost, (fault, outcome)
        assert not outcome.is_half_visible, (fault, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.LATE, Kind.KILL_BEFORE, Kind.OUTAGE_AFTER])
def test_a_manifest_on_its_way(
    kind: Kind, s3_bucket: str, s3_environment: Mapping[str, str]
) -> None:
    """The request with the manifest is that at which most can go wrong."""
    methods = count_requests(s3_bucket)
    # The files of both ranks come before, the second by one request.
    manifest = [place for place, method in enumerate(methods) if method == "put_object"][-1]
    outcome = trial(s3_bucket, "trial", Fault(request=manifest, kind=kind), s3_environment)
    assert not outcome.is_lost
    assert not outcome.is_half_visible
    assert (outcome.ended, outcome.whole) == {
        # It appears after its save has failed, and is whole: nobody has removed its files.
        Kind.LATE: ("refused", frozenset({1, 2, NEWEST})),
        Kind.KILL_BEFORE: ("killed", frozenset({1, 2})),
        Kind.OUTAGE_AFTER: ("refused", frozenset({1, 2, NEWEST})),
    }[kind]
