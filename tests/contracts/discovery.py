"""The concrete classes of the package below an interface: what a table of contracts must hold."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable

from lit_recon import attacks


def concrete(interface: type) -> set[type]:
    """All classes of `lit_recon.attacks` that derive from `interface` and can be built, itself included."""
    for module in pkgutil.walk_packages(attacks.__path__, f"{attacks.__name__}."):
        importlib.import_module(module.name)
    found, waiting = set(), [interface]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if one.__module__.startswith(f"{attacks.__name__}.") and not inspect.isabstract(one):
            found.add(one)
    return found


def missing(interface: type, table: Iterable[object]) -> list[str]:
    """Names of the concrete classes of which no object is in the table."""
    return sorted(one.__name__ for one in concrete(interface) - {type(value) for value in table})
