"""What each op does to memory, events and communicators, precise to region and stream.

Liveness, verification, scheduling and simulation read effects and nothing else, so an op whose effects are right is
handled right by all of them.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Mode


class Effects(NamedTuple):
    """One op's effects; a named tuple, because they are worked out anew wherever they are asked for.

    ``reads``, ``writes`` and ``accumulates`` (a read and a write that keeps what was there) are regions; ``allocs`` and
    ``frees`` buffer names; ``signals`` and ``waits`` event names; ``comm`` a communicator. ``stream`` is what the
    effects happen on; a wait happens on the stream (or the host) it orders.
    """

    stream: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    accumulates: tuple[Region, ...] = ()
    allocs: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    comm: str | None = None


def effects(op: ops.Op) -> Effects:
    """The effects of one op."""
    match op:
        case ops.Wait():
            return Effects(stream=op.on, waits=(op.waited,))
        case ops.Alloc():
            return Effects(stream=op.stream, allocs=(op.buffer,), signals=_signals(op.event))
        case ops.Release():
            return Effects(stream=op.stream, frees=(op.buffer,), signals=_signals(op.event))
        case (
            ops.AllGather()
            | ops.Prefetch()
            | ops.ReduceScatter()
            | ops.AllReduce()
            | ops.Broadcast()
        ):
            staging = () if op.staging is None else (op.staging,)
            return Effects(
                stream=op.stream,
                reads=tuple(pair.source for pair in op.pairs),
                writes=tuple(pair.destination for pair in op.pairs) + staging,
                signals=_signals(op.event),
                comm=op.comm,
            )
        case ops.Compute():
            destinations = [d for d in op.destinations if d is not None]
            return Effects(
                stream=op.stream,
                reads=tuple(argument.view.region for argument in op.arguments),
                writes=tuple(d.view.region for d in destinations if d.mode is Mode.WRITE),
                accumulates=tuple(d.view.region for d in destinations if d.mode is Mode.ACCUMULATE),
                signals=_signals(op.event),
            )
        case ops.Cast():
            is_write = op.mode is Mode.WRITE
            return Effects(
                stream=op.stream,
                reads=(op.source,),
                writes=(op.destination,) if is_write else (),
                accumulates=() if is_write else (op.destination,),
                signals=_signals(op.event),
            )
        case ops.Fill():
            return Effects(stream=op.stream, writes=(op.destination,), signals=_signals(op.event))
        case ops.Scale():
            return Effects(
                stream=op.stream,
                reads=(op.by,),
                accumulates=(op.region,),
                signals=_signals(op.event),
            )
        case ops.GradNorm() | ops.CheckFinite():
            return Effects(
                stream=op.stream,
                reads=op.sources,
                writes=(op.destination,),
                signals=_signals(op.event),
            )
        case ops.Decide():
            return Effects(
                stream=op.stream,
                reads=_present(op.overflow, op.norm, op.loss_scale),
                writes=_present(op.gradient_divisor, op.skip),
                accumulates=(op.step,),
                signals=_signals(op.event),
            )
        case ops.OptimizerStep():
            return Effects(
                stream=op.stream,
                reads=_present(op.step, op.lr, op.hyper, op.gradient_divisor, op.skip),
                # Kernels leave the gradient divided.
                accumulates=(op.param, *op.states, op.grad),
                signals=_signals(op.event),
            )
        case ops.UpdateScale():
            return Effects(
                stream=op.stream,
                reads=(op.skip,),
                accumulates=(op.state,),
                signals=_signals(op.event),
            )
        case ops.ToHost() | ops.ToDevice() | ops.Load() | ops.Store():
            return Effects(
                stream=op.stream,
                reads=(op.source,),
                writes=(op.destination,),
                signals=_signals(op.event),
            )
        case _:
            assert_never(op)


def _signals(event: str | None) -> tuple[str, ...]:
    return () if event is None else (event,)


def _present(*regions: Region | None) -> tuple[Region, ...]:
    return tuple(region for region in regions if region is not None)
