"""Recognizes and converts torch tensors without importing torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array


def imported_torch() -> Any:
    """Return the torch module if it has been imported, else ``None``."""
    return sys.modules.get("torch")


def is_tensor(value: object) -> bool:
    """Return whether ``value`` is a torch tensor, without importing torch."""
    torch = imported_torch()
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def is_dlpack(value: object) -> bool:
    """Return whether a value is an array of another library that NumPy can read only through DLPack."""
    return hasattr(value, "__dlpack__") and not hasattr(value, "__array__")


def as_array(value: Any) -> Array:
    """Return a value as an array.

    Besides anything that `numpy.asarray` accepts, the value may be a DLPack array, a tensor or a list of tensors.
    Tensors may require gradients.
    """
    if is_dlpack(value):
        return np.from_dlpack(value)
    return np.asarray(value if imported_torch() is None else _without_tensors(value))


def _without_tensors(value: Any) -> Any:
    if is_tensor(value):
        value = value.detach().cpu()
        return value.numpy() if value.dtype != imported_torch().bfloat16 else value.float().numpy()
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item) for item in value]
    return value
