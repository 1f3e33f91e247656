"""Segments may only name ops that can do nothing but compute."""

from __future__ import annotations

import pytest

from tests.support.programs import mlp
from zeroir.ir.segments.allowlist import allowed_ops, is_allowed, refusal


@pytest.mark.parametrize(
    "op",
    [
        "aten.mm.default",
        "aten.add.Tensor",
        "aten._to_copy.default",
        "aten.view.default",
        "aten.native_layer_norm_backward.default",
        "aten.embedding_dense_backward.default",
        "aten._native_batch_norm_legit_functional.default",
        "aten.index.Tensor",
        "aten.convolution_backward.default",
        "aten.split.Tensor",
        "prims.convert_element_type.default",
        "zeroir.attention.default",
    ],
)
def test_pure_ops_may_be_named(op: str) -> None:
    assert is_allowed(op)
    assert refusal(op) is None


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("aten.add_.Tensor", "changes its argument"),
        ("aten.__iadd__.Tensor", "changes its argument"),
        ("aten.copy_.default", "changes its argument"),
        ("aten.add.out", "not on the list"),
        ("aten.set_.source_Storage", "changes its argument"),
        ("aten.from_file.default", "not on the list"),
        ("aten._local_scalar_dense.default", "not on the list"),
        ("aten.item.default", "not on the list"),
        ("aten.rand.default", "not on the list"),
        ("aten.native_dropout.default", "not on the list"),
        ("aten.native_batch_norm.default", "not on the list"),
        ("aten._copy_from.default", "not on the list"),
        ("aten.record_stream.default", "not on the list"),
        ("aten._wrapped_linear_prepack.default", "not on the list"),
        ("c10d.allreduce_.default", "not on the list"),
        ("builtins.eval", "not on the list"),
        ("zeroir.attention.default; import os", "not on the list"),
        ("zeroir..default", "not on the list"),
        ("", "not on the list"),
    ],
)
def test_other_ops_may_not(op: str, reason: str) -> None:
    assert not is_allowed(op)
    assert reason in (refusal(op) or "")


def test_hand_made_programs_name_allowed_ops() -> None:
    program = mlp(precision="fp16", keep_fp32=True)
    assert {node.op for s in program.segments for node in s.nodes} <= allowed_ops()


def test_the_list_is_what_torch_declares_pure() -> None:
    """By torch's own schemas: nothing listed changes an argument, and only tensors come out."""
    import torch

    for name in sorted(allowed_ops()):
        namespace, packet, overload = name.split(".")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        op = getattr(found, overload, None)
        if op is None:  # an op that another supported torch has
            continue
        schema = op._schema
        assert not schema.is_mutable, name
        assert all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns), name
        assert not any("Generator" in str(a.type) for a in schema.arguments), name
