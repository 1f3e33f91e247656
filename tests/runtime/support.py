"""What runtime tests share: values for hand-made programs, lowering, and real process groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.examples import IS_THOROUGH
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.zygote import Forked, Zygote, compiling_zygote, other_compiling_zygote
from zeroir.ir.ops import Mode
from zeroir.ir.program import Flat, Program
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment
from zeroir.ir.text import parse
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.comm.local import LocalComm
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.eager import EagerKernels
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.batches import Batch

ROOT = Path(__file__).parents[2]
Source = Callable[[], Zygote]
SOURCES: tuple[Source, ...] = (
    compiling_zygote,
    *((other_compiling_zygote,) if IS_THOROUGH else ()),
)
"""What ranks are forked from."""


def segment(inputs: str, *lines: str) -> Segment:
    """The segment of these inputs, nodes and results, as a program's text has them."""
    body = "\n".join(lines)
    return parse(f"zeroir 1\nmesh dp=1\nsegment @made({inputs}) {{\n{body}\n}}\n").segments[0]


def embedding_gradient(mode: Mode, padding: int) -> tuple[Segment, list[Binding]]:
    """A segment of one operator: the gradient (3, 4, 5) of a lookup (3, 4) in a table (6, 5)."""
    gradient = segment(
        "$0: f32[3,4,5], $1: i64[3,4]",
        f"$2 = aten.embedding_dense_backward.default($0, $1, 6, {padding}, false) : f32[6,5]",
        "return ($2)",
    )
    return gradient, [Binding(mode=mode, stride=(5, 1), is_exclusive=True)]


def lowered(logical: Program, stage: int, world_size: int, replicas: int | None = None) -> Program:
    """The logical program at a ZeRO stage, without a proof after each pass."""
    return applied(logical, tuple(for_stage(stage, world_size, replicas=replicas)))


def initial_flats(program: Program, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters, zeros between them, by buffer name: the same for every lowering of a program."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for flat in program.flats:
        values = torch.zeros(flat.padded_numel)
        for slot in flat.slots:
            values[slot.offset : slot.offset + slot.numel] = 0.3 * torch.randn(
                slot.numel, generator=generator
            )
        found[f"{flat.name}.param"] = values
    return found


def parameters_of(flat: Flat, values: Tensor) -> dict[str, Tensor]:
    """The parameters of a flat by name, aliases included, as views of its elements."""
    return {
        name: values[slot.offset : slot.offset + slot.numel].view(slot.shape)
        for slot in flat.slots
        for name in (slot.name, *slot.aliases)
    }


def require_parameters(
    module: nn.Module, name: str, expected: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Fail unless the parameters of a module are the expected ones, converted to a dtype."""
    compared = 0
    for key, parameter in module.named_parameters(prefix=name):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, expected[key].to(dtype)), key
        compared += 1
    assert compared


def random_batches(
    steps: int,
    world_size: int,
    micro_steps: int = 1,
    seed: int = 1,
    shape: tuple[int, ...] = (4, 6),
) -> list[list[list[Batch]]]:
    """``[step][rank][micro_step]`` batches of the hand-made perceptron."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            [{"x": torch.randn(shape, generator=generator)} for _ in range(micro_steps)]
            for _ in range(world_size)
        ]
        for _ in range(steps)
    ]


Run = TypeVar("Run", Engine, Lockstep)


def begun(run: Run) -> Run:
    """The engine or the virtual ranks with random parameters, the same for every lowering of a program."""
    run.initialise_flats(initial_flats(run.program))
    return run


def prepared_rank(program: Program, comm: Comm | None = None) -> tuple[LocalRanks, RankMemory]:
    """One rank on the CPU with its kernels, and its memory."""
    cpu = torch.device("cpu")
    memory = RankMemory(program, 0, cpu)
    ranks = LocalRanks(
        program=program, memories=[memory], comm=comm or LocalComm(), kernels=EagerKernels(cpu)
    )
    ranks.compile()
    return ranks, memory


def trained_engine(program: Program) -> Engine:
    """An engine of one rank after one step."""
    engine = begun(Engine(program))
    engine.step(random_batches(1, 1)[0][0])
    return engine


Values = Mapping[tuple[str, str], Tensor]
"""Tensors by flat and quantity."""
Key = TypeVar("Key")


def require_same(state: Mapping[Key, Tensor], expected: Mapping[Key, Tensor]) -> None:
    """Fail unless both have the same tensors, bit for bit."""
    assert state.keys() == expected.keys()
    for key, values in state.items():
        assert torch.equal(values, expected[key]), key


def require_equal(first: object, second: object) -> None:
    """Fail unless both are equal, with tensors of the same bits at any depth of mappings."""
    match first, second:
        case Tensor(), Tensor():
            assert torch.equal(first, second)
        case Mapping(), Mapping():
            assert first.keys() == second.keys()
            for key, value in first.items():
                require_equal(value, second[key])
        case _:
            assert first == second


def join(store: str = "store", timeout_s: float = 60.0) -> None:
    """Be a rank of the job that a test has started: meet the others in the test's folder."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TEST_FOLDER']}/{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )


def write_run(engine: Engine, losses: Sequence[float], name: str) -> None:
    """Let rank 0 write the losses of a run, and the states of all ranks, to the test's folder."""
    tensors = {f"{flat}/{quantity}": t for (flat, quantity), t in engine.full_state().items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    if os.environ["RANK"] == "0":
        path = Path(os.environ["TEST_FOLDER"]) / f"{name}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)


def require_run(path: Path, losses: Sequence[float], state: Values) -> None:
    """Fail unless rank 0 has written these losses and, bit for bit, these states."""
    found = load_file(path)
    assert found.pop("losses").tolist() == losses
    require_same(found, {f"{flat}/{quantity}": t for (flat, quantity), t in state.items()})


class Ranks:
    """Processes that run a module of tests, with further environment variables, as the ranks of one job.

    They are forked from ``sources`` in turn: where there are two, neighbours see sets in different orders.
    """

    def __init__(
        self,
        world_size: int,
        folder: Path,
        *args: str,
        module: str = "tests.runtime.workers",
        environment: Mapping[str, str] | None = None,
        sources: Sequence[Source] = SOURCES,
    ) -> None:
        for source in sources[:world_size]:
            source()  # All of them import at once.
        self.processes = [
            Forked(
                sources[rank % len(sources)](),
                module,
                args,
                {
                    **(environment or {}),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "TEST_FOLDER": str(folder),
                },
                folder / f"rank{rank}",
            )
            for rank in range(world_size)
        ]

    def wait(self, timeout_s: float = 120.0) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of every rank; whoever is late is killed and fails the test."""
        deadline = time.monotonic() + timeout_s
        found: list[tuple[int, str, str]] = []
        for process in self.processes:
            code = process.wait(deadline)
            if code is None:
                for other in self.processes:
                    other.kill()
                process.wait(deadline + 10)
            out, err = process.output()
            assert code is not None, f"a rank did not end in {timeout_s} s: {out}{err}"
            found.append((code, out, err))
        return found


def require_success(results: Sequence[tuple[int, str, str]]) -> None:
    """Fail with the output of the first rank that failed."""
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, f"rank {rank} exited with {code}:\n{out}\n{err}"
