"""The ranks of a program: meshes as options give them, and the number of ranks where none is given."""

from __future__ import annotations

import os

from pydantic_core import PydanticCustomError

from zeroir.ir.limits import MOST_RANKS
from zeroir.ir.mesh import REPLICATE_AXIS, SHARD_AXIS, Axis, Mesh


def default_world_size(given: dict[str, object]) -> int:
    """Return the ranks of a given mesh, else of the torchrun job, else the visible GPUs, or 2 without GPUs."""
    # A factory that takes the given values is not called for a help text, where this slow import would be wasted.
    mesh = given.get("mesh")
    if isinstance(mesh, str):
        return parse_mesh(mesh).world_size
    ranks_of_job = os.environ.get("WORLD_SIZE", "")
    if ranks_of_job.isdecimal() and "RANK" in os.environ:
        return int(ranks_of_job)
    import torch

    return torch.cuda.device_count() or 2


def parse_mesh(text: str) -> Mesh:
    """Return the mesh that the text describes.

    Raises:
        PydanticCustomError: if the text is no mesh; it names the mistake.
    """
    names = (REPLICATE_AXIS, SHARD_AXIS)
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in names:
            raise _mesh_error(f"'{name}' is not an axis of it")
        if name in sizes:
            raise _mesh_error(f"{name} is given twice")
        if not (size.isdecimal() and size.isascii() and len(size) <= len(str(MOST_RANKS))):
            raise _mesh_error(f"the size of {name} must be a number of ranks")
        sizes[name] = int(size)
        if sizes[name] < 1:
            raise _mesh_error(f"the size of {name} must be at least 1")
    for name in names:
        if name not in sizes:
            raise _mesh_error(f"{name} is missing")
    mesh = Mesh(axes=tuple(Axis(name=name, size=sizes[name]) for name in names))
    if mesh.world_size > MOST_RANKS:
        raise _mesh_error(f"it has at most {MOST_RANKS} ranks")
    return mesh


def _mesh_error(problem: str) -> PydanticCustomError:
    example = f"{REPLICATE_AXIS}=2,{SHARD_AXIS}=4"
    return PydanticCustomError(
        "mesh", "written like {example}: {problem}", {"example": example, "problem": problem}
    )
