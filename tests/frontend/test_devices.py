"""What a model is for a device that is not there: the graph that torch traces on it, and kernels that run on it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.absent_cuda.compared_models import NAMES
from tools.compare_devices import ASKING, CONVERTING, PRECISIONS, compare
from zeroir.frontend._torch_private import fake_mode, tracer_settings

SAMPLE = (
    "convolutions, channels last",
    "bags of embeddings",
    "logsigmoid, sums and norms",
    "layer and RMS norms",
    "causal attention",
)
DECLARED = {
    "aten._embedding_bag.default": "bookkeeping of its own backward",
    "aten.log_sigmoid_forward.default": "a buffer of its own backward",
    "aten.native_group_norm.default": "statistics in FP32",
    "aten.native_layer_norm.default": "statistics in FP32",
}
"""The operators with other results on a device, which programs declare."""


def test_the_graph_for_cuda_is_what_torch_traces_there() -> None:
    """Its kernels run there, too. What differs from the graph for a CPU are results that only a backward takes."""
    found = compare(SAMPLE)
    for name, compared in found.items():
        assert compared.is_right(name), compared.row(name)
        assert compared.between_devices.types.keys() <= DECLARED.keys()
        assert compared.replayed > 100
    differing = {op for compared in found.values() for op in compared.between_devices.types}
    assert differing >= DECLARED.keys() - {"aten.native_group_norm.default"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_graphs_of_models_for_cuda_are_what_torch_traces_there() -> None:
    """A third of the models, which take a while; the record on docs/gpu.md has all."""
    assert len(NAMES) >= 40
    found = compare(NAMES[::3])
    assert not [
        compared.row(name) for name, compared in found.items() if not compared.is_right(name)
    ]
    assert {op for each in found.values() for op in each.between_devices.types} <= DECLARED.keys()
    different = {name for name, compared in found.items() if compared.from_judge.differing}
    assert {
        name for name in different if not found[name].from_judge.differing.keys() <= CONVERTING
    } <= ASKING.keys()
    assert len(PRECISIONS) == 3


def kinds(device: str) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    """Results of operators, found out as for a trace for the device."""
    mode = fake_mode(device=device)
    made: list[Tensor] = []
    with tracer_settings(mode), torch.no_grad():
        x = torch.empty(2, 8, dtype=torch.bfloat16)
        made += torch.ops.aten.native_layer_norm.default(x, [8], None, None, 1e-5)
        made += torch.ops.aten.log_sigmoid_forward.default(x)
        image = torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last)
        made.append(F.conv2d(image, torch.empty(4, 3, 3, 3)))
        made.append(nn.functional.softmax(x.t(), 0))
        assert {tensor.device.type for tensor in made} == {"cpu"}
    return [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in made]


def test_results_for_one_device_are_not_taken_for_those_of_another() -> None:
    """Torch remembers results of operators for all modes of a process."""
    on_cpu, on_cuda = kinds("cpu"), kinds("cuda")
    assert on_cuda[1][0] == torch.float32
    assert on_cpu[1][0] == torch.bfloat16
    assert on_cuda[4][1] == (0,)
    assert kinds("cpu") == on_cpu
    assert kinds("cuda") == on_cuda
