"""Save and restore torch's settings of a process or thread, which the user's code may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_Restore = Callable[[], object]

_DEVICES = ("cpu", "cuda")
_ALLOWS_TF32 = "allow_tf32"
_PRODUCTS = "matmul"
_FILLS = "fill_uninitialized_memory"


@contextmanager
def torch_globals_kept() -> Iterator[None]:
    """Restore torch's global settings at the end, also after an exception.

    They are the grad mode, the states of the generators (of GPUs if CUDA is in use), the default dtype and device, the
    deterministic flags, autocast, anomaly detection, the number of threads, the precision of FP32 products, and the
    switches of the backends.
    """
    restores = [
        _setting(torch.is_grad_enabled, torch.set_grad_enabled),
        *_generators(),
        _setting(torch.get_default_dtype, torch.set_default_dtype),
        _setting(torch.get_default_device, _set_default_device),
        _determinism(),
        *(_autocast(device) for device in _DEVICES),
        _setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        _anomaly_detection(),
        _setting(torch.get_num_threads, torch.set_num_threads),
        *_precisions(),
        *_backend_switches(),
    ]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _generators() -> list[_Restore]:
    cpu = torch.get_rng_state()
    restores: list[_Restore] = [lambda: torch.set_rng_state(cpu)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpus = torch.cuda.get_rng_state_all()
        restores.append(lambda: torch.cuda.set_rng_state_all(gpus))
    return restores


def _set_default_device(device: torch.device) -> None:
    # A default device slows down every later call of a torch function, so CPU is restored as unset.
    torch.set_default_device(None if device.type == "cpu" else device)


def _determinism() -> _Restore:
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # The module's class has a property of that name, which mypy does not know.
    memory: object = torch.utils.deterministic
    fills = getattr(memory, _FILLS)

    def restore() -> None:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        setattr(memory, _FILLS, fills)

    return restore


def _autocast(device: str) -> _Restore:
    is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def restore() -> None:
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)

    return restore


def _anomaly_detection() -> _Restore:
    is_on, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return lambda: torch.autograd.set_detect_anomaly(is_on, checks_nan)


def _precisions() -> list[_Restore]:
    """Save the precision of FP32 products, for which torch has two interfaces and may refuse reads by the older one."""
    # The modules' classes have properties of these names, which mypy does not know.
    mkldnn: object = torch.backends.mkldnn
    cudnn: object = torch.backends.cudnn
    owners: list[object] = [torch.backends, torch.backends.cuda.matmul, cudnn, mkldnn]
    owners += [getattr(owner, kind) for owner in (cudnn, mkldnn) for kind in ("conv", "rnn")]
    owners.append(getattr(mkldnn, _PRODUCTS))
    restores = [_attribute(owner, "fp32_precision") for owner in owners]
    restores.append(
        _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    )
    restores.append(_attribute(cudnn, _ALLOWS_TF32))
    return restores


def _setting(read: Callable[[], T], write: Callable[[T], object]) -> _Restore:
    """Save a setting, to be restored if it has changed, unless torch refuses to read it now.

    An unchanged setting is not written, because torch refuses to set some flags once they are frozen.
    """
    try:
        saved = read()
    except RuntimeError:
        return lambda: None

    def restore() -> None:
        try:
            is_same = read() == saved
        except RuntimeError:
            is_same = False
        if not is_same:
            write(saved)

    return restore


def _backend_switches() -> list[_Restore]:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    restores = [_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")]
    restores.append(_attribute(torch.backends.mkldnn, "enabled"))
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        read, write = getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp")
        restores.append(_setting(read, write))
    return restores


def _attribute(owner: object, name: str) -> _Restore:
    return _setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))
