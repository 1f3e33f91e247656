"""Real processes: every backend gives the bits of the reference semantics, and says what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.support import Ranks, require_success
from zeroir.runtime.comm.peers import machines_of

pytestmark = pytest.mark.dist

MODULE = "tests.runtime.comm_workers"


@pytest.mark.parametrize(
    ("world_size", "every"),
    [
        pytest.param(2, 7, marks=pytest.mark.slow),
        (3, 11),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_every_collective_equals_lockstep_bit_for_bit(
    tmp_path: Path, world_size: int, every: int
) -> None:
    """Sums and maxima of three floating types, converted on the wire or not, in place or not, whatever their sizes.

    One case in ``every`` is tried.
    """
    results = Ranks(world_size, tmp_path, "equal", str(every), module=MODULE).wait()
    require_success(results)
    assert [out for _, out, _ in results] == ["peer-memory gloo\n"] * world_size


@pytest.mark.slow
def test_every_collective_along_an_axis_equals_lockstep(tmp_path: Path) -> None:
    require_success(Ranks(4, tmp_path, "equal-on-mesh", module=MODULE).wait())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["size", "call"])
def test_ranks_at_different_collectives_say_so(tmp_path: Path, what: str) -> None:
    require_success(Ranks(3, tmp_path, "mismatch", what, module=MODULE).wait())


@pytest.mark.slow
def test_a_killed_rank_is_missed_at_once(tmp_path: Path) -> None:
    results = Ranks(3, tmp_path, "death", module=MODULE).wait()
    assert results[1][0] == -9
    require_success([results[0], results[2]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "backends"),
    [
        ("ab", ["gloo gloo"]),
        ("aba", ["peer-memory and gloo gloo"]),
        ("aabb", ["peer-memory and gloo gloo", "peer-memory and gloo"]),
    ],
)
def test_ranks_of_one_machine_read_memory_where_others_take_gloo(
    tmp_path: Path, hosts: str, backends: list[str]
) -> None:
    """Also where the machines have different numbers of ranks, which need not follow one another."""
    results = Ranks(len(hosts), tmp_path, "machines", hosts, module=MODULE).wait()
    require_success(results)
    assert [out.splitlines() for _, out, _ in results] == [backends] * len(hosts)


@pytest.mark.parametrize(
    ("reached", "machines"),
    [
        (["11", "11"], [(0, 1)]),
        (["11", "01"], [(0,), (1,)]),
        (["101", "010", "101"], [(0, 2), (1,)]),
        (["110", "111", "011"], [(0,), (1,), (2,)]),
    ],
)
def test_a_machine_is_a_set_of_ranks_that_all_reach_each_other(
    reached: list[str], machines: list[tuple[int, ...]]
) -> None:
    rows = [bytes(map(int, row)) for row in reached]
    assert list(machines_of(rows)) == machines
