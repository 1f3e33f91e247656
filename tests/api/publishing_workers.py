"""A rank that trains and publishes, or a process that receives: ``python -m tests.api.publishing_workers ROLE ...``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join, require_same
from zeroir.checkpoint.local_storage import LocalOutput
from zeroir.config.precision import FloatName
from zeroir.errors import UserError
from zeroir.runtime.comm._gloo_private import GlooGroup
from zeroir.runtime.memory.allocations import allocations, peak_bytes

IDS = torch.arange(24).view(2, 12) % 16
SMALL_BYTES = 4096
"""Beside gathered parameters: what ranks tell each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is published, and in which version a receiver and the trainer are killed while it is on its way."""

    dtype: FloatName
    receivers: int | None = None
    receiver_killed_in: int = 0
    trainer_killed_in: int = 3

    @property
    def whole_versions(self) -> list[int]:
        """The versions that come whole to the receivers that live on."""
        return [n for n in range(1, self.trainer_killed_in) if n != self.receiver_killed_in]


PLANS = {
    "file": Plan(dtype="fp32"),
    "network": Plan(dtype="bf16", receivers=2, receiver_killed_in=2, trainer_killed_in=4),
}


def policy(dtype: FloatName = "fp32") -> nn.Module:
    """A Llama with a tied embedding whose parameters have this dtype, as one that is loaded from the hub."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    of_name = {"fp32": torch.float32, "bf16": torch.bfloat16}
    model: nn.Module = cast("Any", AutoModelForCausalLM).from_config(config, dtype=of_name[dtype])
    return model


def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a language model, and the log-probabilities of all tokens."""
    scores = model(ids).logits.log_softmax(-1)
    return -scores[:, :-1].gather(-1, ids[:, 1:, None]).mean(), scores


def killed_in(kind: type, method: str, calls: int) -> None:
    """Let this process be killed in a call of a method."""
    original: Callable[..., object] = getattr(kind, method)
    left = [calls]

    def call(*given: object) -> object:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given)

    setattr(kind, method, call)


def train(plan: Plan, address: str, folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    torch.manual_seed(0)
    options = {"stage": 3, "world_size": world_size, "lr": 0.01, "precision": plan.dtype}
    compiled = zeroir.compile(policy(), IDS, loss=loss, **cast("Any", options))
    engine = compiled.engine(self_check=False)
    largest = max(flat.padded_numel for flat in engine.program.flats)
    unit_bytes = largest * (2 if plan.dtype == "bf16" else 4)
    receivers = plan.receivers
    timeout = timedelta(seconds=60)
    for number in range(1, 1 + plan.trainer_killed_in):
        engine.step(IDS + rank)
        expected = engine.evaluate(IDS).outputs
        assert isinstance(expected, Tensor)
        if number == 1:
            with engine.gathered() as whole, engine.gathered(units="model.layers.1") as lent:
                own, same = (each.get_submodule("model.layers.1") for each in (lent, whole))
                require_same(own.state_dict(), same.state_dict())
                with pytest.raises(UserError, match=r"is of unit root\.pre, which"):
                    lent(IDS)
        if rank == 0:
            save_file({"scores": expected}, folder / f"trained-{number}.safetensors")
            if number == plan.trainer_killed_in:
                killed_in(LocalOutput, "write", 4)
                killed_in(GlooGroup, "broadcast", 4)
        if number == plan.receiver_killed_in:
            with pytest.raises(UserError, match=r"because process \d+ on \S+ ended"):
                engine.publish(address, receivers=receivers, timeout=timeout)
            receivers = None
            continue
        publish = partial(engine.publish, address, receivers=receivers, timeout=timeout)
        most = peak_bytes(allocations(partial(require_version, number, publish)))
        assert unit_bytes <= most <= unit_bytes + SMALL_BYTES, (most, unit_bytes)
        while not (folder / f"received-{number}.safetensors").exists():
            time.sleep(0.05)
    dist.destroy_process_group()


def require_version(number: int, publish: Callable[[], int]) -> None:
    assert publish() == number


def receive(plan: Plan, address: str, folder: Path) -> None:
    is_first = os.environ["RANK"] == "0"
    torch.manual_seed(1)
    model = policy(plan.dtype)
    cast("Any", model).eval()
    receiver = zeroir.Receiver(address, timeout=timedelta(seconds=120))
    for number in range(1, plan.trainer_killed_in):
        if number == plan.receiver_killed_in:
            if not is_first:
                killed_in(GlooGroup, "broadcast", 4)
            with pytest.raises(UserError, match="so the module keeps version 1"):
                receiver.update(model, wait=True)
            continue
        assert receiver.update(model, wait=True)
        assert (receiver.version, receiver.step) == (number, number)
        keep(model, folder / f"received-{number}.safetensors")
    last = receiver.version
    if plan.receivers is None:
        while not (folder / "trainer-is-dead").exists():
            time.sleep(0.05)
        assert not receiver.update(model)
    else:
        with pytest.raises(UserError, match=f"so the module keeps version {last}"):
            receiver.update(model, wait=True)
        assert not receiver.update(model)
    keep(model, folder / "kept.safetensors")


def keep(model: nn.Module, path: Path) -> None:
    """Write what a model computes."""
    with torch.no_grad():
        scores = loss(model, IDS)[1]
    part = path.with_suffix(".part")
    save_file({"scores": scores}, part)
    part.rename(path)


def main() -> None:
    role, name, address = sys.argv[1:]
    folder = Path(os.environ["TEST_FOLDER"]).parent
    {"train": train, "receive": receive}[role](PLANS[name], address, folder)


if __name__ == "__main__":
    main()
