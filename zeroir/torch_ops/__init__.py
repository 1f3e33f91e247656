"""zeroir's own torch operators, which are the same on every device, and the mode that replaces torch's by them.

The frontend traces them into segments and the runtime executes them. Importing this package registers with torch
``zeroir::attention``, ``zeroir::batch_norm`` and ``zeroir::ctc_loss``, each with its backward, ``zeroir::dropout``,
``zeroir::grouped_mm``, ``zeroir::opaque`` with its backward, ``zeroir::uniform`` and the operators of ``out_variants``
and ``strided``.
"""

from zeroir.torch_ops.neutral import NeutralOps, neutral_ops
from zeroir.torch_ops.opaque import opaque, opaque_backward
from zeroir.torch_ops.out_variants import addmm_out, bmm_out, embedding_gradient, mm_out, store
from zeroir.torch_ops.random_numbers import uniform
from zeroir.torch_ops.replaced.attention import attention, attention_backward
from zeroir.torch_ops.replaced.batch_norm import batch_norm, batch_norm_backward
from zeroir.torch_ops.replaced.ctc import ctc_loss, ctc_loss_backward
from zeroir.torch_ops.replaced.dropout import dropout
from zeroir.torch_ops.replaced.grouped import grouped_mm
from zeroir.torch_ops.strided import strided, strided_scatter

__all__ = [
    "NeutralOps",
    "addmm_out",
    "attention",
    "attention_backward",
    "batch_norm",
    "batch_norm_backward",
    "bmm_out",
    "ctc_loss",
    "ctc_loss_backward",
    "dropout",
    "embedding_gradient",
    "grouped_mm",
    "mm_out",
    "neutral_ops",
    "opaque",
    "opaque_backward",
    "store",
    "strided",
    "strided_scatter",
    "uniform",
]
