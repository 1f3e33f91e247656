"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3.

The layouts are those of DeepSpeed 0.19 (``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/bf16_optimizer.py`` and ``utils/zero_to_fp32.py``). Each rank's ``*_optim_states.pt`` has its part of flat
FP32 groups, and states of the optimizer of the same size. ``param_shapes`` of ``*_model_states.pt`` names the
parameters of each group in order.

* Stages 1 and 2: a group is the concatenation of its parameters; ranks hold consecutive parts of equal size, and the
  last one may lack the padding at the end.
* Stage 3: each *parameter* is cut into equal parts, the last padded; a group of a rank has its parts one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from zeroir.checkpoint.manifest import StoredScalar
from zeroir.convert.imported import (
    FLOATING,
    Box,
    ImportedBuffer,
    ImportedModel,
    ImportedParameter,
    ImportedTensor,
    MappedFile,
)
from zeroir.convert.imported_optimizer import (
    STEP,
    ImportedGroup,
    OptimizerState,
    Tree,
    number_in,
    with_optimizer,
)
from zeroir.convert.torch_files import UnknownClass, UnknownTensor, read_torch_files
from zeroir.errors import UserError
from zeroir.ir.optimizers.catalogue import OF_DEEPSPEED, Algorithm

LATEST: Final = "latest"
"""The file with the name of a folder's newest checkpoint."""

MODEL_FILES: Final = "*_model_states.pt"
_OPTIMIZER_FILES: Final = "*_optim_states.pt"
_PARALLEL: Final = re.compile(r"layer_|expert_|.*expert|(zero_pp_rank_\d+_)?mp_rank_(?!00_)")
"""The names of files of tensor, pipeline and expert parallelism."""

_MOST_TAG: Final = 4096
_SCALER: Final = "deepspeed.runtime.fp16.loss_scaler."
_FROZEN: Final = "frozen_param_fragments"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files of a checkpoint: those of the model (one, or at stage 3 one of each rank), and those of optimizers."""

    path: Path
    models: Sequence[Tree]
    optimizers: Sequence[Tree]

    @property
    def stage(self) -> int:
        """3, or 2 for any layout that splits groups instead of parameters."""
        return 3 if any("fp32_flat_groups" in part for part in self.optimizers) else 2

    def damaged(self, problem: str) -> UserError:
        """Return the error for a checkpoint that cannot be read."""
        return UserError(f"'{self.path}' is damaged, or not a checkpoint of DeepSpeed: {problem}.")


def import_deepspeed(folder: Path) -> ImportedModel:
    """Import the model and the optimizer's states of a DeepSpeed checkpoint.

    Args:
        folder: the folder with ``latest``, or the one that it names.

    Raises:
        UserError: if a file is missing or damaged, or the checkpoint has tensor, pipeline or expert parallelism.
    """
    files = _files(_tagged(folder))
    head = files.models[0]
    module = _mapping(files, head.get("module"), "module")
    if not files.optimizers:
        return _weights_alone(files, head, module)
    groups = [
        _mapping(files, shapes, "param_shapes") for shapes in _list(files, head, "param_shapes")
    ]
    shapes = {
        str(name): _shape(files, shape, name) for group in groups for name, shape in group.items()
    }
    members = [[str(name) for name in group] for group in groups]
    values = _cut(files, _flat_groups(files), members, shapes, "FP32 weights")
    aliases: dict[str, list[str]] = {}
    for alias, name in _mapping(files, head.get("shared_params") or {}, "shared_params").items():
        aliases.setdefault(str(name), []).append(str(alias))
    parameters = [
        ImportedParameter(name=name, values=values[name], aliases=tuple(aliases.get(name, ())))
        for name in shapes
    ]
    known = {*shapes, *(alias for names in aliases.values() for alias in names)}
    parameters += _frozen(files, head, module, known)
    model = ImportedModel(
        parameters=tuple(parameters),
        buffers=tuple(_buffers(files, head, module)),
        step=_whole_number(head.get("global_steps")),
        scalars=_loss_scale(files.optimizers[0].get("loss_scaler")),
    )
    return with_optimizer(model, _optimizer(files, head, members, shapes), str(files.path))


def _tagged(folder: Path) -> Path:
    """Return the folder of the newest checkpoint."""
    latest = folder / LATEST
    if not latest.is_file():
        return folder
    with latest.open(errors="replace") as file:
        tag = file.read(_MOST_TAG).strip()
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        raise UserError(f"'{latest}' names '{tag}', which is not a folder beside it.")
    return folder / tag


def _files(folder: Path) -> _Files:
    names = sorted(folder.glob("*.pt"), key=_natural)
    for path in names:
        if _PARALLEL.match(path.name):
            raise UserError(
                f"'{path}' is of tensor, pipeline or expert parallelism: convert the checkpoint with DeepSpeed's "
                "ds_to_universal.py, and import the files of the model."
            )
    model_paths = [path for path in names if path.match(MODEL_FILES)]
    if not model_paths:
        raise UserError(f"'{folder}' has no file {MODEL_FILES}: name a checkpoint of DeepSpeed.")
    optimizer_paths = [path for path in names if path.match(_OPTIMIZER_FILES)]
    paths = [*model_paths, *optimizer_paths]
    trees = read_torch_files([MappedFile(path) for path in paths])
    tree_of = dict(zip(paths, trees, strict=True))
    models = [_tree(tree_of[path], path) for path in model_paths]
    optimizers = [_optimizer_part(tree_of[path], path) for path in optimizer_paths]
    files = _Files(path=folder, models=models, optimizers=optimizers)
    counts = {_count(part) for part in optimizers}
    if optimizers and counts != {len(optimizers)}:
        raise UserError(
            f"'{folder}' has the files of {len(optimizers)} ranks, but {max(counts)} saved it: bring all of them."
        )
    if optimizers and files.stage == 3 and len(models) != len(optimizers):
        raise UserError(
            f"'{folder}' has {len(models)} files {MODEL_FILES}, but {len(optimizers)} ranks saved it: bring all of "
            "them."
        )
    return files


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers within names as numbers."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def _tree(value: object, path: Path) -> Tree:
    if not isinstance(value, Mapping):
        raise UserError(f"'{path}' is not a file of DeepSpeed: it has no dictionary.")
    return value


def _optimizer_part(value: object, path: Path) -> Tree:
    part = _tree(value, path).get("optimizer_state_dict")
    if not isinstance(part, Mapping):
        raise UserError(f"'{path}' is not a file of DeepSpeed: it has no optimizer_state_dict.")
    return part


def _count(part: Tree) -> int:
    """Return the number of ranks that share the parameters."""
    count = part.get("partition_count")
    counts = count if isinstance(count, tuple) else (count,)
    return max((number for number in counts if isinstance(number, int)), default=0)


def _flat_groups(files: _Files) -> list[list[ImportedTensor]]:
    """Return the FP32 weights of each rank, one flat tensor for each group."""
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    return [
        [_tensor(files, item, key) for item in _list(files, part, key)] for part in files.optimizers
    ]


def _cut(
    files: _Files,
    parts: Sequence[Sequence[ImportedTensor]],
    members: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
) -> dict[str, ImportedTensor]:
    """Assemble the tensors of all parameters from the ranks' parts of groups, ``parts[rank][group]``."""
    if any(len(of_rank) != len(members) for of_rank in parts):
        raise files.damaged(f"its {what} have another number of groups than its parameters")
    tensors = {}
    for number, names in enumerate(members):
        of_group = [of_rank[number] for of_rank in parts]
        place = 0
        for name in names:
            numel = prod(shapes[name])
            if files.stage == 3:
                share = -(-numel // len(of_group))
                boxes = [
                    _interval(part, place, min(share, numel - rank * share), rank * share)
                    for rank, part in enumerate(of_group)
                ]
                place += share
            else:
                boxes = list(_consecutive(of_group, place, place + numel))
                place += numel
            found = [box for box in boxes if box is not None]
            if sum(prod(box.shape) for box in found) != numel:
                raise files.damaged(f"its {what} lack elements of {name}")
            tensors[name] = ImportedTensor(
                dtype=of_group[0].dtype, shape=shapes[name], extent=(numel,), boxes=tuple(found)
            )
    return tensors


def _consecutive(parts: Sequence[ImportedTensor], start: int, stop: int) -> Iterator[Box | None]:
    """Yield elements ``[start, stop)`` of the concatenated parts."""
    before = 0
    for part in parts:
        first, last = max(start, before), min(stop, before + part.numel)
        yield _interval(part, first - before, last - first, first - start)
        before += part.numel


def _interval(part: ImportedTensor, start: int, numel: int, at: int) -> Box | None:
    """Return a range of a one-dimensional tensor as a box that begins at ``at``; None if it is empty."""
    (box,) = part.boxes
    elements = box.elements[start : start + max(numel, 0)]
    return Box(starts=(at,), elements=elements, file=box.file) if elements.size else None


def _frozen(
    files: _Files, head: Tree, module: Tree, known: set[str]
) -> Iterator[ImportedParameter]:
    """Yield the frozen parameters: whole in the model's file, or at stage 3 in the ranks' parts."""
    fragments = [tree.get(_FROZEN) for tree in files.models]
    shapes = head.get("frozen_param_shapes")
    if files.stage == 3 and isinstance(shapes, Mapping):
        for name, shape in shapes.items():
            parts = [
                _tensor(files, part.get(name) if isinstance(part, Mapping) else None, str(name))
                for part in fragments
            ]
            sizes = _shape(files, shape, name)
            whole = _cut(
                files, [[part] for part in parts], [[str(name)]], {str(name): sizes}, _FROZEN
            )
            yield ImportedParameter(name=str(name), values=whole[str(name)], is_trainable=False)
        return
    buffers = _buffer_names(head)
    for name, value in module.items():
        if str(name) not in known | buffers:
            values = _tensor(files, value, str(name))
            if files.stage == 3 and not values.numel:
                continue
            yield ImportedParameter(name=str(name), values=values, is_trainable=False)


def _buffers(files: _Files, head: Tree, module: Tree) -> Iterator[ImportedBuffer]:
    names = _buffer_names(head)
    for name, value in module.items():
        if str(name) in names:
            yield ImportedBuffer(name=str(name), tensor=_tensor(files, value, str(name)))


def _buffer_names(head: Tree) -> set[str]:
    names = head.get("buffer_names")
    return {str(name) for name in names} if isinstance(names, tuple) else set()


def _weights_alone(files: _Files, head: Tree, module: Tree) -> ImportedModel:
    """Import a checkpoint without optimizer files, as stage 0 saves it."""
    buffers = tuple(_buffers(files, head, module))
    names = {buffer.name for buffer in buffers}
    parameters = [
        ImportedParameter(name=str(name), values=tensor)
        for name, value in module.items()
        if str(name) not in names and (tensor := _tensor(files, value, str(name))).dtype in FLOATING
    ]
    if not all(parameter.values.numel for parameter in parameters):
        raise files.damaged(
            f"it has no files {_OPTIMIZER_FILES}, in which stage 3 keeps the weights"
        )
    return ImportedModel(
        parameters=tuple(parameters),
        buffers=buffers,
        step=_whole_number(head.get("global_steps")),
        notes=("The optimizer was left out: only the files of stages 1, 2 and 3 are read.",),
    )


def _optimizer(
    files: _Files,
    head: Tree,
    members: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> OptimizerState:
    """Return the states of the optimizer by parameter; each group has one flat tensor for each state."""
    key = "optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"
    ranks = [_group_states(files, part.get(key)) for part in files.optimizers]
    if any(len(of_rank) != len(members) for of_rank in ranks):
        # Before the first step there is no state.
        if not any(ranks):
            return OptimizerState(states={}, groups=())
        raise files.damaged("its optimizer has states of another number of groups")
    states: dict[str, dict[str, object]] = {name: {} for name in shapes}
    for number, names in enumerate(members):
        for state, value in ranks[0][number].items():
            if state == STEP:
                for name in names:
                    states[name][STEP] = value
            elif isinstance(value, ImportedTensor):
                parts = [_tensor(files, of_rank[number].get(state), state) for of_rank in ranks]
                cut = _cut(files, [[part] for part in parts], [names], shapes, state)
                for name in names:
                    states[name][state] = cut[name]
    first = files.optimizers[0].get(key)
    settings = first.get("param_groups") if isinstance(first, Mapping) else None
    lists = (
        [group for group in settings if isinstance(group, Mapping)]
        if isinstance(settings, tuple)
        else []
    )
    groups = []
    for group in lists:
        # Stage 3 splits large groups into several, whose numbers are the "parameters" of the group.
        numbers = group.get("params")
        names = [
            name
            for number in (numbers if isinstance(numbers, tuple) else ())
            if isinstance(number, int) and 0 <= number < len(members)
            for name in members[number]
        ]
        if STEP in group and number_in(group[STEP]) is not None:
            for name in names:
                states[name].setdefault(STEP, group[STEP])
        groups.append(
            ImportedGroup(
                parameters=tuple(names),
                settings={**_kind(head), **{str(k): v for k, v in group.items()}},
            )
        )
    common = files.optimizers[0].get("base_optimizer_state_step")
    if common is not None:
        for of_parameter in states.values():
            of_parameter.setdefault(STEP, common)
    return OptimizerState(states=states, groups=groups)


def _group_states(files: _Files, optimizer: object) -> list[dict[str, object]]:
    """Return the states of a rank's flat groups in order."""
    if isinstance(optimizer, tuple):
        items: list[object] = list(optimizer)
    elif isinstance(optimizer, Mapping):
        by_number = _mapping(files, optimizer.get("state"), "state")
        items = [
            by_number[number] for number in sorted(by_number, key=lambda number: int(str(number)))
        ]
    else:
        raise files.damaged("it has no states of an optimizer")
    return [
        {str(name): value for name, value in item.items()}
        for item in items
        if isinstance(item, Mapping)
    ]


def _kind(head: Tree) -> dict[str, object]:
    """Return the setting that distinguishes DeepSpeed's Adam from its AdamW."""
    config = head.get("ds_config")
    block = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        return {}
    params = block.get("params")
    keys = {str(key): value for key, value in params.items()} if isinstance(params, Mapping) else {}
    for type_name, declared in OF_DEEPSPEED.items():
        is_named = type_name.lower() == str(block["type"]).lower()
        if is_named and not declared.is_from_torch and declared.optimizer is not None:
            return dict(Algorithm(declared.optimizer(type_name, keys)).fixed)
    return {}


def _loss_scale(scaler: object) -> tuple[StoredScalar, ...]:
    """Return the state of a dynamic loss scaler: the scale, the steps since its last change, the hysteresis left."""
    match scaler:
        case (UnknownClass(path=path), Mapping() as state) if path == f"{_SCALER}DynamicLossScaler":
            pass
        case _:
            return ()
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window", "cur_hysteresis")
    numbers = [number for key in keys if (number := number_in(state.get(key))) is not None]
    if len(numbers) < len(keys) or numbers[3] < 1:
        return ()
    scale, now, overflow, window, hysteresis = numbers
    steps = float(loss_scale_steps(int(now), int(overflow), int(window)))
    return (StoredScalar(name="loss_scale", dtype="f32", values=(scale, steps, hysteresis)),)


def loss_scale_steps(step: int, last_overflow: int, window: int) -> int:
    """Return the steps since the last change of the scale, as zeroir counts them, before step ``step`` of a scaler.

    DeepSpeed's scale grows in a step if the number of steps between it and the last overflow is a positive multiple of
    the window. After an overflow, this is one step later than in zeroir, so the count begins at -1.
    """
    between = step - last_overflow - 1
    return (between - 1) % window if between > 0 else -1


def _list(files: _Files, tree: Tree, key: str) -> list[object]:
    value = tree.get(key)
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, tuple):
        raise files.damaged(f"it has no {key}")
    return list(value)


def _mapping(files: _Files, value: object, key: str) -> Tree:
    if not isinstance(value, Mapping):
        raise files.damaged(f"it has no {key}")
    return value


def _shape(files: _Files, value: object, name: object) -> tuple[int, ...]:
    sizes = value if isinstance(value, tuple) else (None,)
    shape = tuple(size for size in sizes if isinstance(size, int) and size >= 0)
    if len(shape) != len(sizes):
        raise files.damaged(f"{name} has no shape")
    return shape


def _tensor(files: _Files, value: object, what: str) -> ImportedTensor:
    if isinstance(value, UnknownTensor):
        raise UserError(f"'{files.path}' has {what}, which cannot be imported: {value.reason}.")
    if not isinstance(value, ImportedTensor):
        raise files.damaged(f"{what} is not a tensor")
    return value


def _whole_number(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
