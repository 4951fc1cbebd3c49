"""The one matrix product that most of a shadow model's time goes into, by the fastest library that is exact."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: Largest relative error of a float32 product of a few hundred terms; rounding to bfloat16 gives a hundred times it.
_FLOAT32_ERROR = 1e-5


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` of `(m, d)` and `(n, d)`.

    For float32 on a CPU, oneDNN multiplies: on processors of other makers it is up to twice as fast as MKL. The
    operator is PyTorch's own but not a public one, so that it is used only where it exists and is exact.

    >>> times_transposed(torch.ones(2, 3), torch.ones(4, 3)).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    fits = a.dtype == torch.float32 and a.device.type == "cpu" and a.numel() and b.numel()
    if fits and not torch.is_grad_enabled() and _has_exact_onednn():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return product
    return a @ b.T


@lru_cache(maxsize=1)
def _has_exact_onednn() -> bool:
    """Whether oneDNN's product can be had, and does not round its factors."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    try:
        found = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return bool((found - exact).norm() <= _FLOAT32_ERROR * exact.norm())
