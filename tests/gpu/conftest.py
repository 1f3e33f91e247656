"""What the GPU tests need, and the reason wherever this machine cannot run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

_REASONS = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_nccl(major, minor): an NCCL of at least that version")
    config.stash[_REASONS] = {}


def missing(item: pytest.Item) -> str | None:
    """Why this machine cannot run a test; None where it can."""
    if item.get_closest_marker("gpu") is None:
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    marker = item.get_closest_marker("needs_nccl")
    if marker is None:
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version >= marker.args:
        return None
    found, wanted = (".".join(map(str, numbers)) for numbers in (version, marker.args))
    return f"NCCL is {found}, and several ranks share a GPU from {wanted} on"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here; a mere listing shows everything."""
    if config.option.collectonly:
        return
    reasons = config.stash[_REASONS]
    left_out = {item: reason for item in items if (reason := missing(item)) is not None}
    for reason in left_out.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason, count in config.stash[_REASONS].items():
        terminalreporter.write_line(f"{count} GPU tests were left out: {reason}.")


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def _one_nccl_rank(device: torch.device, tmp_path: Path) -> Iterator[None]:
    """A default process group of one rank, by NCCL's real initialisation."""
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=device
    )
    yield
    dist.destroy_process_group()
