"""Foreign operators: those that neither torch nor zeroir defines, but a library or the model registers.

A program declares each of them with its schema, so that the schema can be checked where the operator is not registered,
and compared where it is. An operator of a segment has no side effects: its schema changes no argument, returns no
argument's memory, and has tensors as results and tensors, numbers and words as arguments. ``zeroir.torch_ops.purity``
checks the registered operator by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from zeroir.ir.fields import Declares, Form, NameKind
from zeroir.ir.segments.segment import Node, NodeArg

TORCH_NAMESPACES: Final = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized"),
        *("_test", "aten", "bundled_inputs", "c10d", "cuda", "debug_mode_ops", "debugprims"),
        *("export", "flex_lib", "fsdp", "inductor", "inductor_prims", "mkl", "mkldnn"),
        *("mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "prim", "prims", "profiler"),
        *("quantization", "quantized", "quantized_decomposed", "rngprims", "sparse"),
        *("static_runtime", "streams", "symm_mem", "tensorexpr", "torch_attn", "triton", "xpu"),
    }
)
"""The namespaces of torch itself: the list of pure ops says which of their operators a segment may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A foreign operator: ``name`` as in nodes, such as ``mylib.scale.default``, and what torch knows about it.

    ``schema`` is torch's, without the name: ``(Tensor x, float by) -> Tensor``. ``module`` is the Python module that
    registered it; it is empty if the user's own script or model file did, or if torch does not know.
    """

    syntax: ClassVar[str] = "{name} schema={schema} [module={module}]"

    name: Annotated[str, Declares(NameKind.OPERATOR)]
    schema: Annotated[str, Form.QUOTED]
    module: Annotated[str, Declares(NameKind.MODULE)] = ""


_NAME: Final = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*)\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*"
)
_MODULE: Final = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*)?")
_ALIAS: Final = re.compile(r"\([a-z|* >-]+!?\)")
_TYPE: Final = (
    r"(?:Tensor|SymInt|int|SymFloat|float|bool|Scalar|str|ScalarType|Layout|Device|MemoryFormat)"
    r"(?:\[\d*\]|\?)*"
)
_DEFAULT: Final = r"""(?:\[[^\]"]*\]|"[^"]*"|'[^']*'|[^\s,()\[\]"']+)"""
_ARGUMENT: Final = rf"(?:{_TYPE} [A-Za-z_]\w*(?:={_DEFAULT})?|\*)"
_RESULT: Final = r"Tensor(?:\[\])?(?: [A-Za-z_]\w*)?"
_SCHEMA: Final = re.compile(
    rf"\((?:{_ARGUMENT}(?:, {_ARGUMENT})*)?\) -> (?:{_RESULT}|\({_RESULT}(?:, {_RESULT})*\))"
)
_WORD: Final = re.compile(r"[A-Za-z0-9_]{0,64}")


def declaration_problem(operator: Operator) -> str | None:
    """Return why a program may not declare an operator, as words that follow its name; None if it may."""
    name = _NAME.fullmatch(operator.name)
    if name is None:
        return "is not named as NAMESPACE.NAME.OVERLOAD"
    if name[1] in TORCH_NAMESPACES or name[1] == "zeroir":
        return "is in a namespace of torch or zeroir, whose pure ops need no declaration"
    if _MODULE.fullmatch(operator.module) is None:
        return f"is registered by '{operator.module}', which is no name of a module"
    alias = _ALIAS.search(operator.schema)
    if alias is not None:
        rule = "mutation" if "!" in alias[0] else "aliasing"
        return f"breaks the rule of {rule} by its schema {operator.schema}"
    if _SCHEMA.fullmatch(operator.schema) is None:
        return f"has a schema that is not from tensors, numbers and words to tensors: {operator.schema}"
    return None


def call_problem(node: Node, operators: Mapping[str, Operator]) -> str | None:
    """Return why a node may not call the foreign operator that it names, as words that follow its name.

    None if it may.

    A program may come from anywhere, and a text that is not a word could name a file.
    """
    if node.op not in operators:
        return None
    texts = (text for arg in (*node.args, *(arg for _, arg in node.kwargs)) for text in _texts(arg))
    for text in texts:
        if _WORD.fullmatch(text) is None:
            return (
                f"takes the text {text!r:.40}; an operator of a library or the model may take words of letters and "
                "digits only"
            )
    return None


def _texts(arg: NodeArg) -> list[str]:
    if isinstance(arg, tuple):
        return [text for item in arg for text in _texts(item)]
    return [arg] if isinstance(arg, str) else []
