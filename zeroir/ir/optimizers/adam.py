"""Adam and AdamW, as in ``torch.optim``."""

from __future__ import annotations

from typing import Final

from zeroir.ir.optimizers.declaration import Declaration, ElementState
from zeroir.ir.optimizers.elsewhere import DeepSpeedSwitch, InDeepSpeed, InTorch, Values
from zeroir.ir.optimizers.settings import NOT_NEGATIVE, Setting, betas, weight_decay

_SETTINGS: Final = (
    *betas(0.9, 0.999, "exp_avg_sq"),
    Setting(
        name="eps", default=1e-8, effect="number added to the denominator", limits=NOT_NEGATIVE
    ),
)
_STATES: Final = (ElementState(name="exp_avg"), ElementState(name="exp_avg_sq", is_signed=False))


def _deepspeeds(kind: str, keys: Values) -> str:
    return "adamw" if kind == "AdamW" or keys.get("adam_w_mode", True) else "adam"


def _settings_of_deepspeed(kind: str, keys: Values, settings: Values) -> Values:
    if keys["weight_decay"] is not None:
        return settings
    # FusedAdam's default weight decay is 0; torch's AdamW has one.
    is_torchs_adamw = keys["torch_adam"] and _deepspeeds(kind, keys) == "adamw"
    return {**settings, "weight_decay": 0.01 if is_torchs_adamw else 0.0}


ADAM: Final = Declaration(
    title="Adam",
    settings=(*_SETTINGS, weight_decay(0.0)),
    states=_STATES,
    torch=InTorch(class_name="Adam", fixed={"decoupled_weight_decay": False}, counts_steps=True),
    marks=("betas", "eps"),
)

ADAMW: Final = Declaration(
    title="AdamW",
    settings=(*_SETTINGS, weight_decay(0.01)),
    states=_STATES,
    torch=InTorch(
        class_name="AdamW",
        other_classes=("Adam",),
        fixed={"decoupled_weight_decay": True},
        counts_steps=True,
    ),
    deepspeed=InDeepSpeed(
        types=("Adam", "AdamW"),
        is_from_torch=False,
        defaults={"weight_decay": None},
        switches=(
            DeepSpeedSwitch(
                name="adam_w_mode",
                default=True,
                reason="`optimizer`: Adam is adamw unless this is false",
            ),
            DeepSpeedSwitch(
                name="torch_adam",
                default=False,
                reason="without a meaning but for the default of AdamW's weight_decay, 0.01 in torch",
            ),
            DeepSpeedSwitch(
                name="bias_correction",
                default=True,
                reason="zeroir's Adam corrects the bias",
                is_refused=True,
            ),
            DeepSpeedSwitch(
                name="amsgrad", default=False, reason="zeroir has no AMSGrad", is_refused=True
            ),
            DeepSpeedSwitch(
                name="fp32_optimizer_states",
                default=True,
                reason="optimizer states are FP32 in zeroir",
                is_refused=True,
            ),
        ),
        optimizer=_deepspeeds,
        settings=_settings_of_deepspeed,
    ),
    marks=("betas", "eps"),
)
