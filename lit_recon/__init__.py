"""lit_recon: how much of its training data a model or a federated update gives away.

Importing the package is cheap: PyTorch and the rooms are imported on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = (
    "bounds",
    "data",
    "defenses",
    "errors",
    "informed",
    "inversion",
    "metrics",
    "models",
    "modules",
    "observation",
    "privacy",
    "records",
    "reporting",
)

__all__ = ["__version__", *_ROOMS]


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
