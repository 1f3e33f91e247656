"""Parsing the ops of a section, a line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from zeroir.ir import ops
from zeroir.ir.buffers import Region, View
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Algorithm, Mode, Op, Reduction
from zeroir.ir.segment import TensorType
from zeroir.ir.text.lexical import BARE_NAME, STRING
from zeroir.ir.text.parse_segment import parse_dtype, parse_strided
from zeroir.ir.text.scanner import Scanner

T = TypeVar("T")

Types = Mapping[str, tuple[tuple[TensorType | None, ...], tuple[TensorType | None, ...]]]
"""The types of every segment's inputs and outputs."""

_NUMBER: Final = re.compile(r"[ \t]*[0-9]+[ \t]*:")
_REGION: Final = re.compile(
    rf"[ \t]*%(?:({BARE_NAME})|({STRING}))"
    rf"(?:\[(-?[0-9]{{1,30}}):(-?[0-9]{{1,30}})\](?:@(?:({BARE_NAME})|({STRING})))?)?"
)
_PARAMETER: Final = re.compile(rf"[ \t]*(?:({BARE_NAME})|({STRING}))[ \t]*:")
_OPS: Final = (
    "alloc, release, all_gather, prefetch, reduce_scatter, all_reduce, broadcast, wait, compute, "
    "cast, fill, scale, grad_norm, check_finite, decide, optimizer_step, update_scale, to_host, to_device, load, store"
)


class OpParser:
    """Reads ops; ``numels`` and ``types`` are what has been declared so far."""

    def __init__(self, scanner: Scanner, numels: Mapping[str, int], types: Types) -> None:
        self.scanner = scanner
        self.numels = numels
        self.types = types

    def numbered_op(self) -> Op:
        """An op with or without its number, which is derived and not looked at."""
        scan = self.scanner
        number = _NUMBER.match(scan.text, scan.position)
        if number is not None:
            scan.position = number.end()
        return self.op()

    def op(self) -> Op:
        """An op."""
        scan = self.scanner
        event = None
        if scan.text.startswith("!", scan.here()):
            event = scan.sigil_name("!", "an event such as '!0'")
            scan.expect("=")
        position = scan.here()
        keyword = scan.name("an op, an 'exit' line or '}'")
        match keyword:
            case "alloc":
                return ops.Alloc(buffer=self.buffer(), stream=self.stream(), event=event)
            case "release":
                return ops.Release(buffer=self.buffer(), stream=self.stream(), event=event)
            case "all_gather" | "prefetch" | "reduce_scatter" | "all_reduce" | "broadcast":
                return self._collective(keyword, event)
            case "wait":
                if event is not None:
                    scan.fail("expected an op that can signal an event; 'wait' cannot.", position)
                waited = scan.sigil_name("!", "an event such as '!0'")
                return ops.Wait(waited=waited, on=scan.attribute("on", scan.name))
            case "compute":
                return self._compute(event)
            case "cast":
                return self._cast(event)
            case "fill":
                destination = self.region()
                scan.expect("=")
                value = scan.float()
                return ops.Fill(
                    destination=destination, value=value, stream=self.stream(), event=event
                )
            case "scale":
                region = self.region()
                if not scan.accept_keyword("by"):
                    scan.fail("expected 'by' and a one-element region.")
                by = self.region()
                return ops.Scale(region=region, by=by, stream=self.stream(), event=event)
            case "grad_norm":
                sources, destination = self._reduced()
                return ops.GradNorm(
                    sources=sources, destination=destination, stream=self.stream(), event=event
                )
            case "check_finite":
                sources, destination = self._reduced()
                return ops.CheckFinite(
                    sources=sources, destination=destination, stream=self.stream(), event=event
                )
            case "decide":
                return self._decide(event)
            case "optimizer_step":
                return self._optimizer_step(event)
            case "update_scale":
                return self._update_scale(event)
            case "to_host" | "to_device" | "load" | "store":
                return self._transfer(keyword, event)
            case _:
                raise scan.error(f"expected one of {_OPS}, but found '{keyword}'.", position)

    # -------------------------------------------------------------------------------------- regions

    def buffer(self) -> str:
        """``%b``."""
        return self.scanner.sigil_name("%", "a buffer such as '%b'")

    def stream(self) -> str:
        """``stream=compute``."""
        return self.scanner.attribute("stream", self.scanner.name)

    def region(self, what: str = "a region such as '%b' or '%b[0:64]'") -> Region:
        """``%b``, ``%b[0:64]`` or ``%b[0:64]@dp``."""
        scan = self.scanner
        found = _REGION.match(scan.text, scan.position)
        if found is None:
            scan.fail(f"expected {what}.")
        buffer = found[1] or scan.unquote(found[2], found.start(2))
        position = scan.here()
        scan.position = found.end()
        if found[3] is not None:
            shard = found[5] or (scan.unquote(found[6], found.start(6)) if found[6] else None)
            if shard is None and scan.text.startswith("@", found.end()):
                scan.fail("expected a mesh axis right after '@'.", found.end() + 1)
            start = int(found[3])
            return Region(buffer=buffer, offset=start, numel=int(found[4]) - start, shard=shard)
        if scan.text.startswith("[", found.end()):
            scan.fail("expected a range such as '[0:64]', without spaces.", found.end())
        if buffer not in self.numels:
            scan.fail(
                f"expected a 'buffer %{buffer}' line above, since the whole of it is named here.",
                position,
            )
        return Region(buffer=buffer, offset=0, numel=self.numels[buffer])

    def _view(self, declared: TensorType | None, why: str) -> View:
        region = self.region()
        scan = self.scanner
        if scan.text.startswith("{", scan.position):
            shape, stride = parse_strided(scan, "{", "}")
        elif declared is not None:
            shape, stride = declared.shape, declared.stride
        else:
            scan.fail(f"expected a shape such as '{{2,3}}', since {why}.")
        return View(region=region, shape=shape, stride=stride)

    def _regions(self) -> tuple[Region, ...]:
        return self.scanner.several(self.region)

    def _optional_region(self, key: str) -> Region | None:
        return self.region() if self.scanner.accept(key + "=") else None

    # ---------------------------------------------------------------------------------- collectives

    def _collective(self, keyword: str, event: str | None) -> Op:
        scan = self.scanner
        pairs: list[ops.Pair] = []
        if scan.text.startswith("%", scan.here()):
            pairs.append(self._pair())
            while scan.accept(","):
                pairs.append(self._pair())
        comm = scan.attribute("comm", scan.name)
        reduction = Reduction.SUM
        if keyword in ("reduce_scatter", "all_reduce") and scan.accept("reduction="):
            reduction = scan.member(Reduction, "a reduction")
        root = scan.attribute("root", scan.integer) if keyword == "broadcast" else 0
        wire: DType | None = parse_dtype(scan) if scan.accept("wire=") else None
        staging = self._optional_region("staging")
        stream = self.stream()
        if keyword == "reduce_scatter" or keyword == "all_reduce":
            kind = ops.ReduceScatter if keyword == "reduce_scatter" else ops.AllReduce
            return kind(
                pairs=tuple(pairs),
                comm=comm,
                stream=stream,
                reduction=reduction,
                event=event,
                wire_dtype=wire,
                staging=staging,
            )
        if keyword == "broadcast":
            return ops.Broadcast(
                pairs=tuple(pairs),
                comm=comm,
                stream=stream,
                root=root,
                event=event,
                wire_dtype=wire,
                staging=staging,
            )
        gather = ops.AllGather if keyword == "all_gather" else ops.Prefetch
        return gather(
            pairs=tuple(pairs),
            comm=comm,
            stream=stream,
            event=event,
            wire_dtype=wire,
            staging=staging,
        )

    def _pair(self) -> ops.Pair:
        source = self.region()
        self.scanner.expect("->")
        return ops.Pair(source=source, destination=self.region())

    # -------------------------------------------------------------------------------------- compute

    def _compute(self, event: str | None) -> Op:
        scan = self.scanner
        segment = scan.sigil_name("@", "a segment such as '@block.forward'")
        if segment in self.types:
            inputs, outputs = self.types[segment]
            why = f"@{segment} declares no such operand"
        else:
            inputs, outputs = (), ()
            why = f"no segment @{segment} is declared above"
        arguments = self._operands(inputs, lambda declared: self._argument(declared, why))
        scan.expect("->")
        destinations = self._operands(outputs, lambda declared: self._destination(declared, why))
        unit = scan.attribute("unit", scan.name)
        return ops.Compute(
            segment=segment,
            arguments=arguments,
            destinations=destinations,
            unit=unit,
            stream=self.stream(),
            event=event,
        )

    def _operands(
        self,
        declared: tuple[TensorType | None, ...],
        read: Callable[[TensorType | None], T],
    ) -> tuple[T, ...]:
        remaining = iter(declared)
        return self.scanner.several(lambda: read(next(remaining, None)))

    def _argument(self, declared: TensorType | None, why: str) -> ops.Argument:
        return ops.Argument(parameter=self._parameter(), view=self._view(declared, why))

    def _destination(self, declared: TensorType | None, why: str) -> ops.Destination | None:
        scan = self.scanner
        if scan.accept_keyword("_"):
            return None
        gradient = None
        if scan.accept_keyword("grad"):
            gradient = self._parameter()
            if gradient is None:
                scan.fail("expected a parameter's name and ':' after 'grad'.")
        mode = Mode.ACCUMULATE if scan.accept("+=") else Mode.WRITE
        return ops.Destination(view=self._view(declared, why), mode=mode, gradient=gradient)

    def _parameter(self) -> str | None:
        scan = self.scanner
        found = _PARAMETER.match(scan.text, scan.position)
        if found is None:
            return None
        scan.position = found.end()
        return found[1] or scan.unquote(found[2], found.start(2))

    def _cast(self, event: str | None) -> Op:
        source = self.region()
        self.scanner.expect("->")
        mode = Mode.ACCUMULATE if self.scanner.accept("+=") else Mode.WRITE
        destination = self.region()
        return ops.Cast(
            source=source, destination=destination, mode=mode, stream=self.stream(), event=event
        )

    def _reduced(self) -> tuple[tuple[Region, ...], Region]:
        sources = self._regions()
        self.scanner.expect("->")
        return sources, self.region()

    # --------------------------------------------------------------------------------------- update

    def _decide(self, event: str | None) -> Op:
        scan = self.scanner
        return ops.Decide(
            step=scan.attribute("step", self.region),
            gradient_divisor=scan.attribute("gradient_divisor", self.region),
            divisor=scan.attribute("divisor", scan.integer),
            overflow=self._optional_region("overflow"),
            norm=self._optional_region("norm"),
            loss_scale=self._optional_region("loss_scale"),
            skip=self._optional_region("skip"),
            max_norm=scan.float() if scan.accept("max_norm=") else None,
            stream=self.stream(),
            event=event,
        )

    def _optimizer_step(self, event: str | None) -> Op:
        scan = self.scanner
        return ops.OptimizerStep(
            algorithm=scan.member(Algorithm, "an optimizer"),
            param=scan.attribute("param", self.region),
            grad=scan.attribute("grad", self.region),
            states=scan.attribute("states", self._regions),
            step=scan.attribute("step", self.region),
            lr=scan.attribute("lr", self.region),
            hyper=scan.attribute("hyper", self.region),
            gradient_divisor=scan.attribute("gradient_divisor", self.region),
            skip=self._optional_region("skip"),
            group=scan.attribute("group", scan.name),
            stream=self.stream(),
            event=event,
        )

    def _update_scale(self, event: str | None) -> Op:
        scan = self.scanner
        return ops.UpdateScale(
            state=self.region(),
            skip=scan.attribute("skip", self.region),
            window=scan.attribute("window", scan.integer),
            factor=scan.attribute("factor", scan.float),
            hysteresis=scan.attribute("hysteresis", scan.integer),
            minimum=scan.attribute("minimum", scan.float),
            stream=self.stream(),
            event=event,
        )

    # ------------------------------------------------------------------------------------- transfer

    def _transfer(self, keyword: str, event: str | None) -> Op:
        source = self.region()
        self.scanner.expect("->")
        destination = self.region()
        stream = self.stream()
        kinds: dict[str, type[ops.ToHost] | type[ops.ToDevice] | type[ops.Load] | type[ops.Store]]
        kinds = {
            "to_host": ops.ToHost,
            "to_device": ops.ToDevice,
            "load": ops.Load,
            "store": ops.Store,
        }
        return kinds[keyword](source=source, destination=destination, stream=stream, event=event)
