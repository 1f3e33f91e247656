"""Compare a traced micro-step with eager PyTorch under the same operators, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.support.captures import captured
from tests.support.evaluate import at_rest, fill_from, run_section
from zeroir.config import make_options
from zeroir.frontend import load_model_file
from zeroir.frontend.capture.loss_and_outputs import loss_of
from zeroir.frontend.capture.precision import apply_precision, compute_dtype, with_floats_cast
from zeroir.frontend.lowering.tracing import program_of
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.torch_ops import neutral_ops
from zeroir.torch_ops.batches import flatten


def traced(path: str | Path, **options: object) -> Program:
    """The logical program of a model file; one of the repository is captured once for all its programs."""
    made = make_options({"world_size": 1, **options})
    file = load_model_file(str(path))
    return program_of(captured(file, made.precision.dtype, made.precision.keep_fp32), made)


def assert_equals_eager(path: str | Path, **choices: object) -> Program:
    """Trace the model, run one micro-step of the program and one of eager PyTorch, compare everything."""
    options = make_options({"world_size": 1, **choices})
    model_file = load_model_file(str(path))
    program = traced(path, **choices)

    torch.manual_seed(0)
    model = model_file.model()
    apply_precision(model, options.precision.dtype, options.precision.keep_fp32)
    batch = model_file.batch()
    memory = at_rest(program)
    leaves = flatten(batch).tensors
    for each in program.inputs:
        memory[each.buffer].copy_(leaves[each.path].reshape(-1))
    seeds = torch.arange(7, 7 + len(memory.get("rng", ())))
    if "rng" in memory:
        memory["rng"].copy_(seeds)
    fill_from(program, memory, _state(model))

    with neutral_ops(seeds) as mode:
        cast = with_floats_cast(batch, compute_dtype(options.precision.dtype))
        loss = loss_of(model_file, model, cast).float()
        torch.autograd.backward(loss, memory["loss_scale"][0].clone())
    assert mode.sites == len(seeds)
    run_section(program, LAST_MICRO_STEP, memory)

    assert torch.equal(memory["loss"][0], loss.detach())
    assert loss.isfinite()
    suffix = "grad_sum" if options.micro_steps.count > 1 else "grad"
    parameters = dict(model.named_parameters())
    compared = 0
    for flat in program.flats:
        for slot in flat.slots:
            expected = parameters.pop(slot.name).grad
            if not flat.is_trainable:
                assert expected is None, slot.name
                continue
            assert expected is not None, slot.name
            found = memory[f"{flat.name}.{suffix}"][slot.offset : slot.offset + slot.numel]
            assert torch.equal(found.view(slot.shape).to(expected.dtype), expected), slot.name
            compared += 1
    assert not parameters
    assert compared > 0
    after = _state(model)
    for binding in program.module_buffers:
        if binding.data is None:
            found = memory[binding.buffer].view(binding.shape)
            assert torch.equal(found, after[binding.name]), binding.name
    return program


def _state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensor attributes by name."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update((name, buffer.clone()) for name, buffer in model.named_buffers())
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found
