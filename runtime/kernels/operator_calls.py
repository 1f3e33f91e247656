"""C functions that call operators, for compiled segments that are one function (``segment.h``).

Inductor calls an operator without such a function through an object that only AOTInductor's container has, which takes
as long to compile as several segments and on a GPU waits for its previous call. These functions find the operator by
its name, as ``torch.ops`` does, in the process that runs the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

_PARAMETERS: Final = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "bool": "std::int32_t",
    "int": "std::int64_t",
    "Optional[int]": "std::int64_t*",
    "float": "double",
    "Optional[float]": "double*",
}
"""The types of parameters, as Inductor passes arguments of these types of a schema."""

_PREFIX: Final = "zeroir_operator"


@dataclass(frozen=True, slots=True)
class CFunction:
    """A C function that calls an operator: its declaration, and its definition in C++."""

    declaration: str
    definition: str


def operator_calls(
    graph: torch.fx.Graph, device: torch.device
) -> dict[torch._ops.OpOverload, CFunction]:
    """Return a function for each operator of a graph that is not torch's own, where its types allow that."""
    operators = dict.fromkeys(
        node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    )
    calls = {
        operator: _call(operator, device)
        for operator in operators
        if operator.namespace not in ("aten", "prims") and not operator._schema.is_mutable
    }
    return {operator: call for operator, call in calls.items() if call is not None}


def function_name(operator: str, device: str) -> str:
    """Return the name of the function that calls an operator of this name, such as ``zeroir::attention``."""
    return f"{_PREFIX}_{device}_{operator.replace('::', '_')}"


def _call(operator: torch._ops.OpOverload, device: torch.device) -> CFunction | None:
    schema = operator._schema
    if not all(str(value.real_type) == "Tensor" for value in schema.returns):
        return None
    if not all(str(argument.type) in _PARAMETERS for argument in schema.arguments):
        return None
    kinds = [_PARAMETERS[str(argument.type)] for argument in schema.arguments]
    parameters = [f"{kind} argument{index}" for index, kind in enumerate(kinds)]
    results = [f"AtenTensorHandle* result{index}" for index in range(len(schema.returns))]
    name = function_name(schema.name, device.type)
    head = f"AOTITorchError {name}({', '.join([*parameters, *results])})"
    called = f'aoti_torch_call_dispatcher("{schema.name}", "{schema.overload_name}", stack)'
    lines = [
        f"StableIValue stack[{max(len(parameters), len(results), 1)}];",
        *(
            f"stack[{index}] = zeroir::{'optional' if '*' in kind else 'value'}(argument{index});"
            for index, kind in enumerate(kinds)
        ),
        f"AOTI_TORCH_ERROR_CODE_CHECK({called});",
        *(
            f"*result{index} = reinterpret_cast<AtenTensorHandle>(stack[{index}]);"
            for index in range(len(results))
        ),
        "return AOTI_TORCH_SUCCESS;",
    ]
    body = "\n  ".join(lines)
    return CFunction(declaration=head, definition=f"inline {head} {{\n  {body}\n}}")
