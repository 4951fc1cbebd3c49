"""lit_recon: how much of its training data a model or a federated update gives away.

The public API: `evaluate` scores an `Attack` on the updates of a `Client`, who may have a `Defense`; `Knowledge` is
what the attacker has besides. Importing the package is cheap: PyTorch and the subpackages are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_recon.attacks.base import Attack
    from lit_recon.clients import Client
    from lit_recon.defenses import Defense
    from lit_recon.experiments.audit.run import audit
    from lit_recon.experiments.update_attack.evaluate import evaluate
    from lit_recon.records import Knowledge

__version__ = "0.1.0"

#: Public names, and the modules that define them.
_NAMES = {
    "Attack": "attacks.base",
    "Client": "clients",
    "Defense": "defenses",
    "Knowledge": "records",
    "audit": "experiments.audit.run",
    "evaluate": "experiments.update_attack.evaluate",
}
_ROOMS = (
    "attacks",
    "bounds",
    "clients",
    "data",
    "defenses",
    "errors",
    "metrics",
    "models",
    "modules",
    "privacy",
    "records",
    "reporting",
)

__all__ = ["Attack", "Client", "Defense", "Knowledge", "__version__", "audit", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_ROOMS))
