"""Damage checkpoints, each in one place, and look whether the damage is named and the checkpoint before is used.

    python -m tools.flip_checkpoint --count 1000 --record docs/records/flip-checkpoint.json

A job of three ranks saves two checkpoints. Then, again and again, one random bit of the newer one is flipped, in a
tensor, a header, or the manifest. For every tenth flip a file is cut short, lengthened by a few bytes or by holes of
many GB, removed, blanked for 4 kB, or exchanged for that of the older checkpoint; or a value of the manifest is
replaced by one that no training has, and its checksum made anew. After each damage `zeroir checkpoint verify` must
exit with 1 and name the file and, where a tensor's bytes have changed, the tensor; and `zeroir run --resume` must say
the same, go on from the older checkpoint, and say that. This tool finds the tensor in the header of the file. The
exit code is 1 where anything else happens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from rich.progress import track

import zeroir
from tests.support.checkpoint_files import signed_manifest
from tools import record_file
from tools.checkpoints import model as tiny_model
from tools.checkpoints.saving_job import saved_checkpoints
from zeroir.checkpoint.manifest import MANIFEST_NAME
from zeroir.cli.app import run_command

_BLANKED_BYTES: Final = 4096
OTHER_KINDS: Final = (
    *("cut short", "lengthened", "made sparse", "removed", "blanked", "exchanged"),
    "manifest edited",
)
_EDITS: Final[tuple[tuple[tuple[str | int, ...], object], ...]] = (
    (("step",), -1),
    (("step",), "2"),
    (("origin", "world_size"), 0),
    (("files", 0, "size_bytes"), 32 << 30),
    (("flats", 0, "parameters", 0, "shape"), [-1]),
    (("flats", 0, "quantities", 1, "pieces"), []),
    (("flats", 0, "quantities", 0, "dtype"), "f33"),
    (("ranks", 0, "rank"), 3),
)
"""Places in a manifest, and values that no training has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamage:
    """A damage: its kind, its file, and the tensors that messages must name; none where the header has changed, too."""

    kind: str
    file: str
    names: tuple[str, ...]


def tensor_places(path: Path) -> dict[str, range]:
    """The bytes of each tensor of a safetensors file, and of its header under the empty name."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    places = {
        name: range(start + about["data_offsets"][0], start + about["data_offsets"][1])
        for name, about in header.items()
        if name != "__metadata__"
    }
    return {"": range(start), **places}


def flip(checkpoint: Path, chance: Random) -> CheckpointDamage:
    """Flip one bit: of a random file, and there in a random tensor, in the header, or anywhere."""
    path = chance.choice(sorted(checkpoint.iterdir()))
    data = bytearray(path.read_bytes())
    if path.name == MANIFEST_NAME:
        position, kind, tensor = chance.randrange(len(data)), "bit of the manifest", ""
    else:
        places = tensor_places(path)
        tensor = chance.choice(list(places))
        position = chance.choice(places[tensor])
        kind = "bit of a tensor" if tensor else "bit of a header"
    data[position] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return CheckpointDamage(kind=kind, file=path.name, names=(tensor,) if tensor else ())


def damage_otherwise(
    checkpoint: Path, previous: Path, kind: str, chance: Random
) -> CheckpointDamage:
    """A damage of another kind; ``exchanged`` takes the file of the same name of the checkpoint before."""
    names = sorted(path.name for path in checkpoint.iterdir())
    match kind:
        case "blanked":
            path = checkpoint / chance.choice([name for name in names if name != MANIFEST_NAME])
            data = bytearray(path.read_bytes())
            start = chance.randrange(0, len(data), _BLANKED_BYTES)
            before = bytes(data[start : start + _BLANKED_BYTES])
            data[start : start + _BLANKED_BYTES] = bytes(len(before))
            changed = {start + offset for offset, byte in enumerate(before) if byte}
            tensors = [
                name
                for name, place in tensor_places(path).items()
                if any(position in place for position in changed)
            ]
            path.write_bytes(data)
            return CheckpointDamage(
                kind=kind, file=path.name, names=() if "" in tensors else tuple(tensors)
            )
        case "exchanged":
            files = [name for name in names if name != MANIFEST_NAME]
            path = checkpoint / chance.choice(files)
            shutil.copyfile(previous / path.name, path)
        case "removed":
            path = checkpoint / chance.choice(names)
            path.unlink()
        case "cut short":
            path = checkpoint / chance.choice(names)
            os.truncate(path, chance.randrange(path.stat().st_size))
        case "made sparse":
            path = checkpoint / chance.choice(names)
            os.truncate(path, chance.randrange(1 << 30, 1 << 36))
        case "manifest edited":
            path = checkpoint / MANIFEST_NAME
            manifest = json.loads(path.read_bytes())["manifest"]
            (*place, last), value = chance.choice(_EDITS)
            holder = manifest
            for key in place:
                holder = holder[key]
            holder[last] = value
            path.write_bytes(signed_manifest(manifest))
        case _:
            path = checkpoint / chance.choice(names)
            with path.open("ab") as file:
                file.write(bytes(chance.randrange(1, 100)))
    return CheckpointDamage(kind=kind, file=path.name, names=())


def problems(folder: Path, program: Path, damage: CheckpointDamage) -> Iterator[str]:
    """Sentences on what the commands did otherwise than they must."""
    newest, previous = folder / "step-00000002", folder / "step-00000001"
    code, said = _said("checkpoint", "verify", newest)
    if code != 1 or not _names(said, damage):
        yield f"verify exits with {code} and says: {said}"
    code, said = _said(
        *("run", program, "--steps", 2, "--resume", folder, "--no-self-check"),
        *("--log-every", 100, "--model", tiny_model.__file__),
    )
    if code != 0 or not _names(said, damage, is_first_enough=True):
        yield f"run exits with {code} and says: {said}"
    elif "The one before it is tried." not in said or f"Resumed from {previous}" not in said:
        yield f"run goes on otherwise, and says: {said}"


def _names(said: str, damage: CheckpointDamage, *, is_first_enough: bool = False) -> bool:
    """Whether messages name the file and all tensors; a load stops at the first one."""
    told = [f"ensor {name} of " in said for name in damage.names]
    # Without its manifest a folder is no checkpoint at all.
    is_file_named = f"/{damage.file}'" in said or f"contains no {MANIFEST_NAME}" in said
    return is_file_named and (any(told) if told and is_first_enough else all(told))


def _said(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and everything that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run_command([str(argument) for argument in arguments])
    return code, out.getvalue()


def main() -> int:
    """Damage, read and count."""
    parser = argparse.ArgumentParser(description="Damage checkpoints.")
    parser.add_argument("--count", type=int, default=100, help="how many flips")
    parser.add_argument("--seed", type=int, default=0)
    record_file.add_option(parser)
    arguments = parser.parse_args()
    counts: dict[str, list[int]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved_checkpoints(folder / "checkpoints", world_size=3, steps=2)
        newest, previous = (folder / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
        shutil.copytree(newest, folder / "whole")
        program = folder / "alone.zir"
        zeroir.compile(tiny_model.__file__, stage=3, world_size=1).save(program)
        jobs = [("", number) for number in range(arguments.count)]
        jobs += [
            (OTHER_KINDS[number % len(OTHER_KINDS)], number)
            for number in range(arguments.count // 10)
        ]
        for kind, number in track(jobs, "Damaging", disable=not sys.stderr.isatty()):
            chance = Random(f"{arguments.seed} {kind} {number}")
            damage = (
                damage_otherwise(newest, previous, kind, chance) if kind else flip(newest, chance)
            )
            wrong = list(problems(folder / "checkpoints", program, damage))
            for problem in wrong:
                print(f"{damage.kind} {number} of {damage.file} {damage.names}: {problem}")
            row = counts.setdefault(damage.kind, [0, 0])
            row[0] += 1
            row[1] += not wrong
            shutil.rmtree(newest)
            shutil.copytree(folder / "whole", newest)
        code, said = _said("checkpoint", "verify", newest)
        if code != 0:
            raise RuntimeError(f"The checkpoint was not whole without damage: {said}")
    rows = [[kind, *map(str, row)] for kind, row in sorted(counts.items())]
    sums = [sum(row[column] for row in counts.values()) for column in (0, 1)]
    record_file.publish(
        arguments.record,
        "flip_checkpoint",
        ["damage", "checkpoints", "named, and the one before used"],
        [*rows, ["sum", *map(str, sums)]],
        {"seconds": round(time.monotonic() - start)},
    )
    return 0 if sums[0] == sums[1] else 1


if __name__ == "__main__":
    sys.exit(main())
