"""Lets `import torchvision` succeed beside a PyTorch that cannot load torchvision's compiled operators.

The wheels on the package index are built for CUDA. Beside a CPU-only PyTorch their extension does not load, and the
import then stops at `operator torchvision::nms does not exist`, although everything that this project needs from
torchvision is plain Python. Others stop with it, because they import torchvision themselves: lpips; torchmetrics
as a whole (its image metrics ARNIQA and DISTS do so at module level); and pytorch_lightning, through torchmetrics.

Importing this module is the cure. It comes before the first import of any of the four, in a section of its own:

    import lit_recon._torchvision

It declares the schemas of the missing operators and imports torchvision again. There are no kernels behind them:
calling one still ends in torchvision's own explanation. A torchvision that loads by itself is left untouched.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.library import Library

_MISSING_OPERATOR = re.compile(r"operator torchvision::\w+ does not exist")
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

#: Keeps the declarations alive: PyTorch withdraws them together with the object that made them.
_declarations: list[Library] = []


def import_torchvision() -> ModuleType:
    """Import torchvision, with the missing operators declared where its extension does not load.

    Returns:
        The torchvision package; on every later call the same one.

    Raises:
        ModuleNotFoundError: if torchvision is not installed.
        RuntimeError: if torchvision fails for any other reason than a missing operator of its own.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not _MISSING_OPERATOR.search(str(error)):
            raise
    _declare_operators()
    # The first attempt left submodules behind that hold on to a package which no longer exists.
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def _declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _declarations.append(library)


if importlib.util.find_spec("torchvision") is not None:
    import_torchvision()
