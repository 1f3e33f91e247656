"""The graph for Graphviz, parsed back by another's parser."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pydot
import pytest

from tests.support.schedules import Case
from zeroir.ir.analysis.effects import effects
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.report.graph import dot

# The parser is slow, and it still calls another library by names that this one deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pydot")
PROGRAM = Case(stage=3, blocks=1).scheduled


def parse(text: str) -> pydot.Dot:
    graphs = pydot.graph_from_dot_data(text)
    assert graphs is not None
    (graph,) = graphs
    return graph


@cache
def parsed(section: str) -> pydot.Subgraph:
    (cluster,) = clusters(parse(dot(PROGRAM, section=section)))
    return cluster


def clusters(graph: pydot.Graph) -> list[pydot.Subgraph]:
    return list(graph.get_subgraph_list())


@pytest.mark.parametrize("name", [UPDATE, pytest.param(LAST_MICRO_STEP, marks=pytest.mark.slow)])
def test_every_op_stands_in_the_cluster_of_its_stream(name: str) -> None:
    cluster, section = parsed(name), PROGRAM.section_by_name[name]
    assert cluster.get("label") == f'"{name}"'
    nodes: set[str] = set()
    for stream in clusters(cluster):
        named = {node.get_name() for node in stream.get_node_list()}
        expected = {
            f"op_0_{index}"
            for index, op in enumerate(section.body)
            if f'"{effects(op).stream}"' == stream.get("label")
        }
        assert named == expected != set()
        nodes |= named
    assert len(nodes) == len(section.body)


@pytest.mark.slow
def test_every_wait_has_an_edge_from_its_signal() -> None:
    cluster, section = parsed(LAST_MICRO_STEP), PROGRAM.section_by_name[LAST_MICRO_STEP]
    dashed = {
        (edge.get_source(), edge.get_destination())
        for edge in cluster.get_edge_list()
        if edge.get("style") == "dashed"
    }
    signals = {event: i for i, op in enumerate(section.body) for event in effects(op).signals}
    waits = {
        (f"op_0_{signals[event]}", f"op_0_{i}")
        for i, op in enumerate(section.body)
        for event in effects(op).waits
        if event in signals
    }
    assert waits
    assert waits <= dashed


def test_odd_names_are_quoted() -> None:
    sections = tuple(
        replace(section, name=name, body=section.body[:2])
        for name, section in zip(('a "b" \\ c\nd; }', "\\"), PROGRAM.sections, strict=True)
    )
    odd: Program = replace(PROGRAM, sections=sections)
    assert len(clusters(parse(dot(odd)))) == len(sections)
