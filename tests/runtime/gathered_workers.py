"""One rank that gives a module to an engine and borrows it: ``python -m tests.runtime.gathered_workers SCENARIO``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.runtime.constructors import Mlp
from tests.runtime.support import join, lowered, random_batches, require_parameters
from tests.runtime.workers_cases import varied
from tests.support.programs import mlp
from tests.support.resident import peak_resident_bytes
from zeroir.config.precision import FloatName
from zeroir.errors import UserError
from zeroir.frontend.capture.precision import compute_dtype
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.text import parse
from zeroir.memory.placement import places_to_run
from zeroir.runtime.comm.job import Backend, PeerError
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.state import initial_values
from zeroir.runtime.state.full_parameters import whole_parameters

FOLDER = Path(os.environ["TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DIM = 96


class WithBuffer(Mlp):
    """The perceptron with a buffer that no training step reads, of another value on each rank."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(dim=DIM)
        self.register_buffer("mask", torch.full((3, 5), RANK, dtype=torch.int32))


def peak(scenario: str) -> None:
    """Print by how much an engine raises the peak of this process, and the bytes of its buffers."""
    blocks, dim = 24, 1024
    program = lowered(mlp(blocks=blocks, dim=dim), 3, 1)
    module = Mlp(blocks=blocks, dim=dim)
    before = peak_resident_bytes()
    Engine(program).initialise(module, keep_module=scenario == "kept")
    after = peak_resident_bytes()
    temporary = sum(placement.size_bytes for placement in places_to_run(program).values())
    persistent = sum(buffer.size_bytes for buffer in program.buffers if buffer.is_persistent)
    print(after - before, persistent + temporary)


def of_rank_0() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: p.detach().clone() for name, p in WithBuffer().named_parameters()}


def values() -> None:
    """At every stage all ranks hold the values of rank 0's module, and no module keeps its own."""
    expected = of_rank_0()
    for stage in range(4):
        torch.manual_seed(RANK)
        module = WithBuffer()
        state = None
        if stage == 3:  # from a state, which rank 0 alone opens
            module.to("meta")
            state = expected if RANK == 0 else None
            module.mask = torch.full((3, 5), RANK, dtype=torch.int32)
        engine = Engine(lowered(mlp(dim=DIM, precision="bf16"), stage, WORLD_SIZE))
        engine.initialise(module, state=state)
        for name, value in engine.full_parameters().items():
            assert torch.equal(value, expected[name]), name
        assert all(p.is_meta for p in module.parameters())
        assert module.mask[0, 0] == RANK
        with engine.gathered() as gathered:
            assert gathered.get_buffer("mask").eq(0).all()
        engine.close()


def failing_state() -> None:
    """A state that fails on rank 0 after the first values ends all ranks, with the reason there."""
    state = of_rank_0()
    del state["post.weight"]
    module = Mlp(dim=DIM).to("meta")
    engine = Engine(lowered(mlp(dim=DIM), 2, WORLD_SIZE))
    expected = (
        (UserError, "The state has no 'post.weight': KeyError")
        if RANK == 0
        else (PeerError, "Rank 0 could not give the model's values")
    )
    with (
        patch.object(initial_values, "_BATCH_NUMEL", 1),
        pytest.raises(expected[0], match=expected[1]),
    ):
        engine.initialise(module, state=state.__getitem__)
    engine.close()


def gathered(backend: str) -> None:
    """Between steps, at every stage, modules with the present values: whole, and parts of one large unit."""
    for precision in ("fp32", "bf16"):
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        for stage in range(4):
            engine = Engine(
                lowered(mlp(dim=DIM, precision=precision), stage, WORLD_SIZE),
                EngineSettings(backend=Backend(backend)),
            )
            torch.manual_seed(0)
            engine.initialise(Mlp(dim=DIM))
            for step in random_batches(2, WORLD_SIZE):
                engine.step(step[RANK])
                expected = engine.full_parameters()
                biases = {
                    f"blocks.{index}.bias" for index in range(3)
                }  # less than half of their flats
                for slot, (value,) in whole_parameters(
                    engine.program,
                    [engine.rank_program.memory],
                    engine.job.comm,
                    biases,
                    masters=True,
                ):
                    assert torch.equal(value, expected[slot.name])
                for name in ("", "blocks.1", "blocks", "post"):
                    with engine.gathered(name) as module:
                        require_parameters(module, name, expected, dtype)
                    with engine.gathered(name, masters=True) as module:
                        require_parameters(module, name, expected, torch.float32)
                pairs = dict(engine.parameters())
                assert pairs.keys() == expected.keys()
                assert all(torch.equal(pairs[key], expected[key]) for key in pairs)
            engine.close()


def generate(name: str, precision: FloatName) -> None:
    """A model of Hugging Face generates in the block what an eager one with the same parameters does.

    Its program of one device is in the folder.
    """
    source = load_model_file(f"tests/support/models/{name}.py")
    logical = parse((FOLDER / "program.zir").read_text())
    for stage in (1, 3):
        engine = Engine(lowered(logical, stage, WORLD_SIZE))
        is_in_hand = stage == 3
        torch.manual_seed(5)
        engine.initialise(source.model() if is_in_hand else source.model, 5)
        for step in range(2):
            engine.step(varied(source.batch(), step, RANK))
        eager = source.model().eval()
        eager.load_state_dict(engine.full_parameters(), strict=False)
        for parameter in eager.parameters():
            parameter.data = parameter.data.to(compute_dtype(precision))
        tokens = torch.arange(6).view(2, 3) + RANK
        with engine.gathered() as gathered, torch.no_grad():
            assert type(gathered) is type(eager)
            gathered.eval()
            assert torch.equal(gathered(tokens).logits, eager(tokens).logits)
            generated = [
                attrgetter("generate")(model)(
                    tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
                )
                for model in (gathered, eager)
            ]
        assert generated[0].shape == (2, 11)
        assert torch.equal(*generated)
        folder = FOLDER / f"saved-{stage}"
        with engine.gathered(masters=True) as gathered:
            attrgetter("save_pretrained")(gathered)(folder)  # transformers writes on rank 0 alone
        expected = engine.full_parameters()
        if RANK == 0:
            loaded = attrgetter("from_pretrained")(type(gathered))(folder)
            require_parameters(loaded, "", expected, torch.float32)
        engine.close()


SCENARIOS: dict[str, Callable[..., None]] = {
    "peak": peak,
    "values": values,
    "failing-state": failing_state,
    "gathered": gathered,
    "generate": generate,
}


def main() -> None:
    scenario, *args = sys.argv[1:]
    join(f"store-{'-'.join(sys.argv[1:])}")
    SCENARIOS[scenario](*args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
