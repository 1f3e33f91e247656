"""What torch.compile keeps of a model's forward for its backward: the only place that looks into it.

It leans on private names of torch 2.13; where torch has moved them, the failure names this torch.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from zeroir.frontend.capture.loss_and_outputs import call_with
from zeroir.frontend.source import entry


def saved_bytes(path: Path) -> int:
    """Bytes of the storages that a compiled model's forward leaves for its backward, each counted once.

    The model is compiled as a whole with Inductor's decompositions and the default partitioner, and runs on its
    example batch. Parameters, module buffers and the batch itself do not count.
    """
    # Here, because importing the compiler takes seconds, and few tests want it.
    try:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table
    except ImportError as error:
        pytest.fail(f"torch {torch.__version__} has moved what torch.compile consists of: {error}")
    model_file = entry.load_model_file(str(path))
    torch.manual_seed(0)
    model = model_file.model()
    assert isinstance(model, nn.Module)
    model.train()
    batch = model_file.batch()
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compiled = torch.compile(model, backend=backend, dynamic=False)
    given = {
        tensor.untyped_storage()._cdata
        for tensor in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch))
        if isinstance(tensor, Tensor)
    }
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor)  # Else another storage might come to stand at its address.
        if storage._cdata not in given:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with (
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        warnings.simplefilter("ignore")  # What the compiler says of itself is not ours to mend.
        call_with(compiled, batch)
    return sum(found.values())


def _as_it_is(module: fx.GraphModule, _: object) -> fx.GraphModule:
    return module
