"""Lets `import torchvision` succeed beside a PyTorch that cannot load torchvision's compiled operators.

Beside a CPU-only PyTorch, wheels built for CUDA stop at `operator torchvision::nms does not exist`, although this
project needs plain Python from torchvision only; so do lpips, torchmetrics and pytorch_lightning, which import it.

Importing this module before the first of the four declares the schemas of the missing operators, without kernels, and
imports torchvision again. A torchvision that loads by itself is left untouched.
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
    """The torchvision package, with the missing operators declared where its extension does not load.

    Raises:
        ModuleNotFoundError: if torchvision is not installed.
        RuntimeError: if torchvision fails for any other reason than a missing operator of its own.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not _MISSING_OPERATOR.search(str(error)):
            raise
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _declarations.append(library)
    # The first attempt left submodules behind that hold on to a package which no longer exists.
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


if importlib.util.find_spec("torchvision") is not None:
    import_torchvision()
