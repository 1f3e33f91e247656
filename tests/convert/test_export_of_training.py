"""A run of zeroir that others continue: what ranks of an engine save is exported, loaded by torch and trained on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zeroir
from tests.convert import torch_workers as workers
from tests.convert.trained import require_two_ranks_go_on
from tests.runtime.support import Ranks, require_success
from zeroir.convert.export import export_checkpoint


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("stage", "kinds"), [(1, ("fsdp2",)), (3, ("fsdp2", "ddp"))])
def test_fsdp2_and_ddp_go_on_with_our_losses(
    stage: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    module = "tests.convert.zeroir_workers"
    ranks = Ranks(3, tmp_path, str(tmp_path), str(stage), module=module)
    require_success(ranks.wait())
    expected = json.loads((tmp_path / "zeroir.json").read_text())
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "dcp", to="dcp")
    for kind in kinds:
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        require_two_ranks_go_on(kind, tmp_path, expected, rtol=5e-6)


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, dampening=0.1, foreach=False)


def adam(module: nn.Module) -> Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01, eps=1e-6, foreach=False)


def adafactor(module: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.01, foreach=False)


def muon(module: nn.Module) -> Optimizer:
    matrices = [value for value in module.parameters() if value.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")


@pytest.mark.slow
@pytest.mark.parametrize("make", [sgd, adam, adafactor, muon])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_optimizers_of_torch_go_on_with_our_states(
    make: Callable[[nn.Module], Optimizer], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = workers.Net()
    compiled = zeroir.compile(module, workers.batch(0), optimizer=make(module), world_size=1)
    engine = compiled.engine(self_check=False)
    for step in range(workers.STEPS_BEFORE):
        engine.step(workers.batch(step))
    engine.optimizer.param_groups[0]["lr"] = 0.02
    engine.save(tmp_path / "checkpoint")
    expected = [engine.step(workers.batch(step)).loss for step in workers.AFTER]
    engine.close()
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "dcp", to="dcp")
    torch.manual_seed(99)
    other = workers.Net()
    optimizer = make(other)
    workers.load_dcp(other, optimizer, tmp_path / "dcp")
    assert optimizer.param_groups[0]["lr"] == 0.02
    losses = workers.take_steps(other, optimizer, workers.AFTER)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=5e-6, atol=0)


class Counting(nn.Module):
    """Statistics that a step changes, a buffer that no forward reads, one that is not saved, and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("version", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.unused = nn.Parameter(torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.norm(self.inner(x))) * self.get_buffer("scale")
        return y.square().mean() + self.get_buffer("cache").sum()


def test_the_state_dict_of_a_run_is_that_of_its_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Counting()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = torch.randn(8, 4)
    compiled = zeroir.compile(module, batch, optimizer=adam(module), world_size=1)
    engine = compiled.engine(self_check=False)
    for _ in range(2):
        engine.step(batch)
    engine.save(tmp_path / "checkpoint")
    engine.close()
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "w.pt", to="state-dict")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    other = Counting()
    other.load_state_dict(weights, strict=True)
    assert other.norm.num_batches_tracked == 2
    assert not torch.equal(weights["norm.running_mean"], before["norm.running_mean"])
    assert not torch.equal(weights["inner.weight"], before["inner.weight"])
    for name in ("scale", "version", "frozen.weight", "unused"):
        assert torch.equal(weights[name], before[name]), name


def test_states_that_torch_does_not_know_are_left_out_and_named(tmp_path: Path) -> None:
    module = nn.Linear(4, 3, bias=False)
    compiled = zeroir.compile(
        module,
        torch.randn(8, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer="shampoo",
        world_size=1,
    )
    engine = compiled.engine(self_check=False)
    engine.step(torch.randn(8, 4))
    engine.save(tmp_path / "checkpoint")
    engine.close()
    report = export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "dcp", to="dcp")
    assert any("Shampoo" in note for note in report.notes)


@pytest.mark.slow
def test_from_pretrained_of_a_trained_model_computes_our_loss(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, 61, (2, 8))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    model = LlamaForCausalLM(config)
    compiled = zeroir.compile(model, batch, optimizer="adamw", lr=1e-2, world_size=1)
    engine = compiled.engine(self_check=False)
    for _ in range(3):
        engine.step(batch)
    engine.save(tmp_path / "checkpoint")
    expected = engine.step(batch).loss
    engine.close()
    report = export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out", to="hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert report.notes == ()
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    with torch.no_grad():
        loss = loaded.train()(**batch).loss
    torch.testing.assert_close(loss.item(), expected, rtol=1e-6, atol=0)
