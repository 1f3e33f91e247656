"""The elements at rest that a temporary buffer stands for, by the transfers that fill and empty it."""

from __future__ import annotations

import pytest

from zeroir.ir.buffers import Region
from zeroir.ir.text import parse

HEADER = """zeroir 1
mesh dp=2
flat a : f32[512] unit=a trainable {
}
buffer %disk : f32[512] disk param = param a
buffer %home : f32[512] host master = master a
buffer %kept : f32[512] device param = param a
buffer %host : f32[512] host staging
buffer %device : f32[512] device staging
buffer %slice : f32[256] device staging
buffer %small : f32[256] host staging
buffer %lone : f32[512] device staging
section update {
"""


def rests(body: str, name: str, offset: int, numel: int, shard: str | None = None) -> Region | None:
    lines = [
        f"  {line}  stream={'io' if 'disk' in line else 'copy_in'}\n" for line in body.split("; ")
    ]
    program = parse(HEADER + "".join(lines) + "}\n")
    return program.at_rest(Region(buffer=name, offset=offset, numel=numel, shard=shard))


def test_a_buffer_at_rest_stands_for_itself() -> None:
    own = Region(buffer="home", offset=64, numel=64, shard="dp")
    assert rests("to_device %home -> %device", "home", 64, 64, "dp") == own


@pytest.mark.parametrize("body", ["to_device %home -> %device", "to_host %device -> %home"])
@pytest.mark.parametrize("shard", [None, "dp"])
def test_a_copy_stands_for_what_it_is_filled_from_or_emptied_to(
    body: str, shard: str | None
) -> None:
    expected = Region(buffer="home", offset=64, numel=128, shard=shard)
    assert rests(body, "device", 64, 128, shard) == expected


def test_a_copy_on_the_host_stands_for_what_rests_on_the_device() -> None:
    expected = Region(buffer="kept", offset=64, numel=128)
    assert rests("to_host %kept -> %host", "host", 64, 128) == expected


def test_it_may_stand_elsewhere() -> None:
    body = "to_device %home[128:256] -> %device[0:128]; to_host %device[64:128] -> %home[192:256]"
    assert rests(body, "device", 64, 64) == Region(buffer="home", offset=192, numel=64)


def test_a_copy_of_a_slice_is_that_slice() -> None:
    body = "to_device %home[0:512]@dp -> %slice"
    assert rests(body, "slice", 0, 256) == Region(buffer="home", offset=0, numel=512, shard="dp")
    part = Region(buffer="home", offset=0, numel=512, shard="dp", part=(64, 128))
    assert rests(body, "slice", 64, 64) == part
    assert rests(body, "slice", 0, 256, "dp") is None


def test_copies_of_copies_stand_for_what_rests_on_disk() -> None:
    body = "load %disk -> %host; to_device %host -> %device; to_host %device -> %host"
    assert rests(body, "device", 0, 64) == Region(buffer="disk", offset=0, numel=64)


def test_a_slice_passes_through_a_buffer_of_its_own() -> None:
    """A slice arrives by one host buffer, and the whole departs by another: both stand where the slice is at rest."""
    body = (
        "load %disk[0:512]@dp -> %small; to_device %small -> %device[0:512]@dp; "
        "to_host %device -> %host; store %host -> %disk"
    )
    expected = Region(buffer="disk", offset=0, numel=512, shard="dp")
    assert rests(body, "device", 0, 512, "dp") == expected
    assert rests(body, "small", 0, 256) == expected
    assert rests(body, "device", 64, 64) == Region(buffer="disk", offset=64, numel=64)


def test_what_stands_for_several_stands_for_none() -> None:
    """A slot that pages use in turn."""
    body = "to_device %home[0:128] -> %device[0:128]; to_device %home[128:256] -> %device[0:128]"
    assert rests(body, "device", 0, 128) is None


def test_what_nothing_fills_stands_for_nothing() -> None:
    assert rests("to_device %home -> %device", "lone", 0, 512) is None


def test_a_copy_of_what_stands_for_nothing_stands_for_nothing() -> None:
    assert rests("to_device %host -> %device", "device", 0, 512) is None
