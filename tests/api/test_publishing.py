"""Weights that an engine publishes: who receives them computes what the program computes, or keeps the old ones."""

from __future__ import annotations

import contextlib
import copy
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import zeroir
from tests.api.publishing_workers import PLANS
from tests.api.test_gathered_models import BATCH, Net
from tests.runtime.support import Ranks, require_success
from zeroir.config.precision import Precision
from zeroir.errors import UserError

SOON = timedelta(seconds=0.2)


def test_a_file_has_the_values_and_names_of_the_module(tmp_path: Path) -> None:
    """Several dtypes, a tie, buffers that are saved and others that are not."""
    path = tmp_path / "net.safetensors"
    precision = Precision(dtype="bf16", keep_fp32=("body.1",))
    compiled = zeroir.compile(Net(), BATCH, precision=precision, evaluate=False)
    engine = compiled.engine(self_check=False)
    receiver, received = zeroir.Receiver(path, timeout=SOON), Net()
    received.last.weight = nn.Parameter(torch.zeros(8, 8))
    assert not receiver.update(received)
    for version in (1, 2):
        engine.step(BATCH)
        assert engine.publish(path) == version
        assert receiver.update(received)
        assert not receiver.update(received)
        assert (receiver.version, receiver.step) == (version, version)
        with engine.gathered() as expected:
            state = expected.state_dict()
            for name, tensor in received.state_dict().items():
                assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    with engine.gathered() as expected:
        dtypes = {name: tensor.dtype for name, tensor in expected.state_dict().items()}
    pairs: list[tuple[str, Tensor]] = []
    assert zeroir.Receiver(path).update(pairs.extend)
    del dtypes["last.weight"]
    assert {name: tensor.dtype for name, tensor in pairs} == dtypes
    with pytest.raises(UserError, match=r"In 0 s no newer weights have come to .*net\.safetensors"):
        receiver.update(received, wait=True)
    with pytest.raises(UserError, match=r"Another process publishes to"):
        compiled.engine(model=Net(), self_check=False).publish(path)
    engine.close()
    again = compiled.engine(model=Net(), self_check=False)
    assert again.publish(str(path), masters=True) == 3
    assert load_file(path)["body.0.weight"].dtype is torch.float32


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file({"x": torch.ones(1)}, path)
    teacher = nn.Linear(8, 8).requires_grad_(False)  # is sharded with the model, but not published

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return functional.mse_loss(net(x), teacher(x))

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    frozen = {"teacher": teacher}
    engine = zeroir.compile(net, BATCH, loss=loss, frozen=frozen, evaluate=False).engine()
    with pytest.raises(UserError, match=r"was not written by engine\.publish"):
        engine.publish(path)
    path.unlink()
    engine.publish(path)
    assert load_file(path).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for second, third, sentence in (
        (nn.Linear(8, 4), None, r"'1\.weight' was published with the shape \[8, 8\]"),
        (nn.Linear(8, 8, bias=False), None, r"'1\.bias' was published, but"),
        (nn.Linear(8, 8), nn.Linear(8, 8), r"'2\.weight', which was not published"),
        (nn.Linear(8, 8, device="meta"), None, "on the meta device"),
        (None, None, r"one tensor for '0\.weight' and '1\.weight'"),
    ):
        first = nn.Linear(8, 8)
        module = nn.Sequential(first, second or first, *([third] if third else []))
        before = copy.deepcopy(module.state_dict())
        receiver = zeroir.Receiver(path)
        with pytest.raises(UserError, match=sentence):
            receiver.update(module)
        assert receiver.version == 0
        for name, tensor in module.state_dict().items():
            assert tensor.is_meta or torch.equal(tensor, before[name])
    with pytest.raises(UserError, match="leave out receivers=2"):
        engine.publish(path, receivers=2)
    with pytest.raises(UserError, match="is no address of weights"):
        engine.publish(tmp_path)
    with pytest.raises(UserError, match=r"cannot be written"):
        engine.publish(path / "net.safetensors")
    with pytest.raises(UserError, match=r"its folder is not there"):
        engine.publish(tmp_path / "missing" / "net.safetensors")
    assert not (tmp_path / "missing").exists()
    engine.step(BATCH)


def test_receivers_that_do_not_come_are_missing_and_may_come_later() -> None:
    net, received, address = nn.Linear(8, 8), nn.Linear(8, 8), free_address()
    compiled = zeroir.compile(net, BATCH, loss=lambda net, x: net(x).mean(), evaluate=False)
    engine = compiled.engine(self_check=False)
    receiver = zeroir.Receiver(address)
    assert not receiver.update(received)
    with pytest.raises(UserError, match="0 of 1 receivers asked for new weights at"):
        engine.publish(address, timeout=SOON)
    assert not receiver.update(received)
    with ThreadPoolExecutor() as threads:
        update = threads.submit(receiver.update, received, wait=True)
        with pytest.raises(UserError, match=r"1 of 2 receivers \(process \d+ on .*\) asked"):
            engine.publish(address, receivers=2, timeout=timedelta(seconds=2))
        assert engine.publish(address) == 1
        assert update.result()
    other = compiled.engine(model=nn.Linear(8, 8), self_check=False)
    with pytest.raises(UserError, match=f"cannot publish at {address}: .* free port"):
        other.publish(address)
    engine.close()
    assert not receiver.update(received)
    for name, tensor in net.state_dict().items():
        assert torch.equal(received.state_dict()[name], tensor)


def free_address() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("name", "world_size"), [("file", 2), ("network", 3)])
def test_receivers_compute_what_ranks_compute_until_one_of_them_is_killed(
    name: str, world_size: int, tmp_path: Path
) -> None:
    """Rank 0 is killed while it publishes, and one of two receivers before, which the trainer names."""
    plan = PLANS[name]
    address = str(tmp_path / "policy.safetensors")
    if plan.receivers is not None:
        address = free_address()

    def started(role: str, count: int) -> Ranks:
        module = "tests.api.publishing_workers"
        folder = tmp_path / role
        folder.mkdir()
        return Ranks(count, folder, role, name, address, module=module)

    trainer = started("train", world_size)
    receivers = started("receive", plan.receivers or 1)
    codes = [code for code, _, _ in trainer.wait(300)]
    (tmp_path / "trainer-is-dead").touch()
    assert codes[0] == -signal.SIGKILL
    survivor, *killed = receivers.wait(300)
    require_success([survivor])
    assert [code for code, _, _ in killed] == [-signal.SIGKILL] * len(killed)
    scores = {
        each.stem: load_file(each)["scores"]
        for each in tmp_path.glob("*.safetensors")
        if each.stem != "policy"
    }
    for version in plan.whole_versions:
        assert torch.equal(scores[f"received-{version}"], scores[f"trained-{version}"])
        assert not torch.equal(scores[f"received-{version}"], scores[f"trained-{version + 1}"])
    assert torch.equal(scores["kept"], scores[f"trained-{plan.whole_versions[-1]}"])


def test_a_receiver_stands_for_its_address(tmp_path: Path) -> None:
    engine = zeroir.compile(Net(), BATCH, evaluate=False, world_size=1).engine(self_check=False)
    receiver, copy_of_net = zeroir.Receiver(tmp_path / "net.safetensors"), Net()
    engine.step(BATCH)
    assert engine.publish(receiver) == 1
    assert receiver.update(copy_of_net)
    expected = engine.state_dict()
    for name, value in copy_of_net.state_dict().items():
        assert torch.equal(value, expected[name])
    receiver.close()
    with (
        contextlib.closing(zeroir.Receiver("127.0.0.1:29417")) as other,
        pytest.raises(UserError, match=r'call engine.publish\("127.0.0.1:29417"\)'),
    ):
        engine.publish(other)
    engine.close()
