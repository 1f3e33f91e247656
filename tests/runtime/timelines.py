"""What every recorded step must show, whatever its times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.program import Program
from zeroir.ir.spans import Span


def require_program_order(program: Program, sections: Sequence[str], spans: Sequence[Span]) -> None:
    """Each stream ran its ops once, one after the other, in the program's order; nobody went on before an event."""
    by_place = {(span.section, span.index): span for span in spans}
    assert len(by_place) == len(spans)
    ordered = [
        (by_place[name, index], op)
        for name in sections
        for index, op in enumerate(program.section_by_name[name].body)
    ]
    assert len(ordered) == len(spans)
    last_of: dict[str, Span] = {}
    signals: dict[str, Span] = {}
    for span, op in ordered:
        effect = effects(op)
        assert span.start_ns <= span.end_ns
        before = last_of.get(effect.stream)
        assert before is None or before.end_ns <= span.start_ns, (before, span)
        last_of[effect.stream] = span
        for event in effect.waits:
            if event in signals:  # else of a step before
                assert signals[event].end_ns <= span.end_ns, (signals[event], span)
        signals.update(dict.fromkeys(effect.signals, span))


def overlapping(program: Program, spans: Sequence[Span]) -> dict[str, int]:
    """By op on a stream other than compute's, the nanoseconds at which a segment was computed, too."""
    of_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        op = program.section_by_name[span.section].body[span.index]
        of_kind[ops.op_name(type(op))].append(span)
    return {
        kind: sum(
            max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns))
            for a in found
            for b in of_kind["compute"]
        )
        for kind, found in of_kind.items()
        if kind != "compute"
    }
