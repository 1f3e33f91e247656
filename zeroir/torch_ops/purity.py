"""The rules by which an operator of torch's dispatcher may be part of a program.

A segment is a pure function of dense tensors. The schema and the tags of an operator determine whether it can be part
of one; some of ATen's operators are known to do more than their schemas declare. The same rules generate the list of
ATen's pure operators (``tools/list_aten_ops.py``) and check operators that a library or the model registers, when a
model is compiled and again before its program runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Final

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as fake_kernels
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from zeroir.ir.segments.allowlist import is_allowed
from zeroir.ir.segments.operators import TORCH_NAMESPACES, Operator
from zeroir.ir.segments.views import shares_storage


class Rule(StrEnum):
    """A rule for the operators of segments; the value is its name in messages."""

    MUTATION = "mutation"
    ALIASING = "aliasing"
    RANDOMNESS = "randomness"
    HOST_READS = "host reads"
    TENSORS = "tensors only"
    GRADIENTS = "gradients"


_REMEDIES: Final[Mapping[Rule, str]] = {
    Rule.MUTATION: "return the new value instead",
    Rule.ALIASING: "return a copy instead",
    Rule.RANDOMNESS: "pass the numbers with the batch, or draw uniform or normal ones with torch's own functions",
    Rule.HOST_READS: "return tensors of a fixed shape instead",
    Rule.GRADIENTS: "register one with torch.library.register_autograd, or detach its arguments",
    Rule.TENSORS: "use an operator from dense tensors to dense tensors",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A rule that an operator breaks; ``clause`` says how, and follows the operator in a message."""

    rule: Rule
    clause: str

    def __str__(self) -> str:
        return f"breaks the rule of {self.rule}: it {self.clause}; {_REMEDIES[self.rule]}"


class ImpureOperatorError(Exception):
    """A model's call of a foreign operator breaks a rule."""

    def __init__(self, op: torch._ops.OpOverload, breach: Breach) -> None:
        super().__init__(f"the operator {op} {breach}")
        self.op = op
        self.breach = breach


_ARGUMENT_TYPES: Final = re.compile(
    r"(Optional\[)?(List\[)?(Optional\[)?(Tensor|int|bool|float|number|str|Device)\]*"
)
"""All types except generators, storages, streams and classes. Dtypes, layouts and memory formats are int here."""

_RESULT_TYPES: Final = frozenset({"Tensor", "List[Tensor]"})
_HOST_TYPES: Final = re.compile(r".*\b(int|float|bool|number|str)\b.*")

_RANDOM_ONLY_WITH_DROPOUT: Final = re.compile(
    r"_?(scaled_dot_product|flash|efficient|cudnn)_.*attention"
)
"""Fused attention is tagged random for its dropout, which the frontend turns off."""

_KNOWN_BREACHES: Final[Sequence[tuple[re.Pattern[str], Rule, str]]] = (
    (
        re.compile(
            r"batch_norm|native_batch_norm|cudnn_batch_norm|instance_norm|_batch_norm_impl_index"
            r"|batch_norm_update_stats|batch_norm_gather_stats.*"
        ),
        Rule.MUTATION,
        "updates running statistics without saying so in its schema",
    ),
    (
        re.compile(
            r"from_file|.*as_strided.*|_reshape_alias.*|unsafe_(chunk|split.*)|.*resize.*|set|set_data|data"
            r"|.*pin_memory|_to_cpu|_copy_from.*|_lazy_clone"
        ),
        Rule.ALIASING,
        "concerns storage, files or devices rather than values",
    ),
    (
        re.compile(
            r"is_.*|_is_.*|_test_.*|_debug.*|_async.*|_assert.*|_functional_(assert|sym).*|_make_dep_token|_print|_foobar"
            r"|_fw_primal.*|_(make|unpack)_dual.*|_(add|remove)_batch_dim|_autocast.*|_amp_.*|_has_.*"
        ),
        Rule.HOST_READS,
        "serves the host: properties of tensors, debugging, or modes of tracing and differentiation",
    ),
    (
        re.compile(
            # anything but dense tensors, and packed weights, which hold pointers
            r".*sparse.*|hspmm|_?coalesced?|_?(ccol_|col_|crow_|row_)?(indices|values)(_copy)?|.*nested.*"
            r"|.*_(csr|coo)_.*|.*jagged.*|.*quantized.*|_make_per_.*|int_repr|dequantize|.*prepack.*|.*fbgemm.*"
            r"|_mkldnn_.*|mkldnn_.*|.*mkldnn|_cslt.*|.*qparams.*|.*int[48]pack.*|_dyn_quant.*"
            # kernels of one kind of machine, and recurrent cells, which keep hidden state
            r"|.*_mps|_mps_.*|.*miopen.*|_triton_.*|.*rnn.*|.*lstm.*|.*gru.*"
        ),
        Rule.TENSORS,
        "needs tensors that are not dense, or hidden state of one kind of machine",
    ),
)
"""ATen's operators that are pure by their schemas, but not pure functions of dense tensors."""


def is_foreign(op: torch._ops.OpOverload) -> bool:
    """Return whether the operator was registered by a library or the model, not by torch or zeroir."""
    return op.namespace not in TORCH_NAMESPACES and op.namespace != "zeroir"


def breach(op: torch._ops.OpOverload) -> Breach | None:
    """Return the first rule that an operator breaks; None if it breaks none."""
    schema = op._schema
    name = f"{op.namespace}.{op._opname}.{op._overloadname}"
    changed = [argument.name for argument in schema.arguments if _is_written(argument)]
    if changed or schema.is_mutable:
        what = f"its argument '{changed[0]}'" if changed else "an argument"
        return Breach(rule=Rule.MUTATION, clause=f"changes {what} in place")
    is_aliasing = any(result.alias_info is not None for result in schema.returns)
    if is_aliasing and not shares_storage(name):
        return Breach(rule=Rule.ALIASING, clause="returns a view of an argument's memory")
    if not schema.returns:
        return Breach(
            rule=Rule.MUTATION, clause="returns nothing, so all that it does is a side effect"
        )
    for result in schema.returns:
        kind = str(result.type)
        if kind not in _RESULT_TYPES:
            is_of_host = _HOST_TYPES.fullmatch(kind) is not None
            clause = f"returns {kind} to the host, where a program is fixed before any value exists"
            return Breach(
                rule=Rule.HOST_READS if is_of_host else Rule.TENSORS,
                clause=clause if is_of_host else f"returns {kind} where programs have tensors",
            )
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    takes_generator = any("Generator" in str(argument.type) for argument in schema.arguments)
    if takes_generator or (is_random and _RANDOM_ONLY_WITH_DROPOUT.match(op._opname) is None):
        return Breach(
            rule=Rule.RANDOMNESS,
            clause="draws random numbers, and programs have no hidden random state",
        )
    for argument in schema.arguments:
        kind = str(argument.type)
        if _ARGUMENT_TYPES.fullmatch(kind) is None:
            clause = f"takes {kind} as '{argument.name}', which no program holds"
            return Breach(rule=Rule.TENSORS, clause=clause)
    if op.namespace in TORCH_NAMESPACES:
        for names, rule, clause in _KNOWN_BREACHES:
            if names.fullmatch(op._opname):
                return Breach(rule=rule, clause=clause)
    return None


def foreign_operator(func: object) -> torch._ops.OpOverload | None:
    """Return the foreign operator that a function calls; None if it is another function."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, "default", None)
    return func if isinstance(func, torch._ops.OpOverload) and is_foreign(func) else None


def pure_call(op: torch._ops.OpOverload, call: Callable[[], object]) -> object:
    """Call a foreign operator of a model while it is traced, or run under the same conditions.

    The call is checked, not only its nodes: a number for the host leaves no node, and neither does a gradient for which
    the operator has no formula.

    Raises:
        ImpureOperatorError: if the operator breaks a rule.
    """
    broken = breach(op)
    if broken is not None:
        raise ImpureOperatorError(op, broken)
    try:
        result = call()
    except DynamicOutputShapeException:
        clause = "makes a shape that depends on the values of a tensor"
        raise ImpureOperatorError(op, Breach(rule=Rule.HOST_READS, clause=clause)) from None
    results = result if isinstance(result, list | tuple) else [result]
    needs_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in results)
    if needs_gradient and not _has_formula(op):
        clause = (
            "has no autograd formula, though its result depends on tensors that need a gradient"
        )
        raise ImpureOperatorError(op, Breach(rule=Rule.GRADIENTS, clause=clause))
    return result


def _has_formula(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator has a backward formula, or consists of operators that have one."""
    name = f"{op.namespace}::{op._opname}"
    definition = OPDEFS.get(name)
    if definition is not None:
        return definition._backward_fn is not None
    full_name = name if op._overloadname == "default" else f"{name}.{op._overloadname}"
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key) for key in keys)


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def declarations(names: Iterable[str]) -> tuple[Operator, ...]:
    """Return the declarations of the foreign operators among a program's operators, sorted by name."""
    foreign = sorted({name for name in names if not is_allowed(name)})
    return tuple(
        Operator(name=name, schema=schema_text(op), module=_module(op))
        for name, op in ((name, _overload(name)) for name in foreign)
    )


def schema_text(op: torch._ops.OpOverload) -> str:
    """Return the schema of an operator without its name: ``(Tensor x, float by) -> Tensor``."""
    text = str(op._schema)
    return text[text.index("(") :]


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, packet, overload = name.split(".")
    op: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return op


def _module(op: torch._ops.OpOverload) -> str:
    """Return the importable module that defines the operator or registers its fake kernel; empty if unknown."""
    qualified_name = f"{op.namespace}::{op._opname}"
    definition = OPDEFS.get(qualified_name)
    if definition is not None:
        # The first function of a triton_op is torch's; its fake kernel is the user's.
        functions = (definition._init_fn, definition._abstract_fn)
        modules = (str(function.__module__) for function in functions if function is not None)
        return _importable(next((name for name in modules if not name.startswith("torch.")), ""))
    kernel = fake_kernels.find(qualified_name).fake_impl.kernel
    file = "" if kernel is None else kernel.source.rpartition(":")[0]
    names = (name for name, module in sys.modules.items() if file and _file(module) == file)
    return _importable(next(names, ""))


def _file(module: ModuleType) -> str | None:
    return getattr(module, "__file__", None)


def _importable(module: str) -> str:
    """Return the name of a module, unless it is the user's script or model file."""
    return "" if module == "__main__" or module.startswith("_zeroir_model_") else module
