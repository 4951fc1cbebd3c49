"""Matrix products with images: sparse for pixels that are nearly always 0, dense for the others.

At the border of handwritten digits, a pixel is 0 in nearly all images. If it is 0 in all of them, it is left out; if it
is 0 in most, a sparse product needs much less arithmetic than a dense one. Images are processed in blocks, so that the
result of a product is still in the processor's cache when it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

#: Largest relative error of a float32 product of a few hundred terms; rounding to bfloat16 gives a hundred times it.
_FLOAT32_ERROR = 1e-5


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` of `(m, d)` and `(n, d)`.

    For float32 on a CPU, oneDNN multiplies: on processors other than Intel's it is up to twice as fast as MKL. The
    operator is private to PyTorch: it is used only if it exists and is exact.
    """
    fits = a.dtype == torch.float32 and a.device.type == "cpu" and a.numel() and b.numel()
    if fits and not torch.is_grad_enabled() and _has_exact_onednn():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return product
    return a @ b.T


@lru_cache(maxsize=1)
def _has_exact_onednn() -> bool:
    """Whether oneDNN's product is available and does not round its factors."""
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


#: Largest share of images in which a pixel that is multiplied sparsely is not 0; both ways break even at 0.1 to 0.2.
_SELDOM = 0.1
#: Least share of such pixels that makes up for a second product, whose result is transposed.
_WORTHWHILE = 0.125
#: Most images of a block on a CPU; rows of 4 KiB, a power of 2, would compete for the same cache lines.
_BLOCK = 1_000


class Parts(NamedTuple):
    """A matrix of `m` rows and one column per pixel, without pixels that are 0 in all images."""

    often: Tensor  # columns of pixels that are multiplied densely, `(m, a)`
    seldom: Tensor | None  # transposed columns of pixels that are multiplied sparsely, `(b, m)`; None if there are none


class UsedPixels(NamedTuple):
    """Indices of the pixels that are multiplied densely (`often`; None: all) and sparsely (`seldom`)."""

    often: Tensor | None
    seldom: Tensor

    @classmethod
    def of(cls, images: Tensor) -> UsedPixels:
        """The faster choice for images `(n, d)`; sparse only on a CPU with MKL."""
        if images.device.type == "cpu" and torch.backends.mkl.is_available():
            share = images.count_nonzero(0) / len(images)
            rare = share <= _SELDOM
            if rare.float().mean() >= _WORTHWHILE:
                return cls((~rare).nonzero()[:, 0], (rare & (share > 0)).nonzero()[:, 0])
        return cls.all_of(images)

    @classmethod
    def all_of(cls, images: Tensor) -> UsedPixels:
        """All densely, for images that are used once."""
        return cls(None, torch.empty(0, dtype=torch.long, device=images.device))

    def n_often(self, images: Tensor) -> int:
        """Number of pixels of `(n, d)` that are multiplied densely."""
        return images.shape[1] if self.often is None else len(self.often)

    def split(self, matrix: Tensor) -> Parts:
        """The parts of `(m, d)`."""
        if self.often is None:
            return Parts(matrix, None)
        seldom = matrix.T[self.seldom] if len(self.seldom) else None
        return Parts(matrix.index_select(1, self.often), seldom)

    def join(self, parts: Parts, n_pixels: int) -> Tensor:
        """The matrix `(m, d)` of these parts, 0 elsewhere."""
        if self.often is None:
            return parts.often
        whole = parts.often.new_zeros(len(parts.often), n_pixels)
        whole.index_copy_(1, self.often, parts.often)
        return whole if parts.seldom is None else whole.index_copy_(1, self.seldom, parts.seldom.T)


class Block(NamedTuple):
    """Some images, prepared for products."""

    numbers: slice  # indices of the images
    often: Tensor  # pixels that are multiplied densely, `(n, a)`
    seldom: Tensor | None  # the others in compressed rows, `(n, b)`; None if there are none
    seldom_transposed: Tensor | None  # the same, `(b, n)`

    def outputs(self, weights: Parts) -> Tensor:
        """The images' products with every row of `weights`, `(m, n)`."""
        wide = times_transposed(weights.often, self.often)
        if self.seldom is not None and weights.seldom is not None:
            wide.add_(_sparse_product(self.seldom, weights.seldom).T)
        return wide

    def sums(self, factors: Tensor) -> Parts:
        """Sums of the images, weighted by every row of `(m, n)`."""
        often = times_transposed(factors, self.often.T)
        if self.seldom_transposed is None:
            return Parts(often, None)
        return Parts(often, _sparse_product(self.seldom_transposed, factors.T.contiguous()))


def block_size(images: Tensor, n: int | None = None) -> int:
    """Images per block: on a CPU few enough for the cache, elsewhere all `n`."""
    n = len(images) if n is None else n
    return max(1, min(n, _BLOCK) if images.device.type == "cpu" else n)


def blocks(images: Tensor, pixels: UsedPixels) -> list[Block]:
    """Of images `(n, d)`."""
    size, found = block_size(images), []
    for start in range(0, max(1, len(images)), size):
        numbers = slice(start, start + size)
        parts = pixels.split(images[numbers])
        seldom = None if parts.seldom is None else _compressed(parts.seldom.T)
        transposed = None if parts.seldom is None else _compressed(parts.seldom)
        found.append(Block(numbers, parts.often.contiguous(), seldom, transposed))
    return found


def _compressed(matrix: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return matrix.contiguous().to_sparse_csr()


def _sparse_product(sparse: Tensor, dense: Tensor) -> Tensor:
    # `torch.mm` would fill and copy a matrix of zeros first, which takes longer than the product.
    found = dense.new_empty(sparse.shape[0], dense.shape[1])
    return torch.addmm(found, sparse, dense, beta=0, out=found)


def added(parts: Sequence[Parts]) -> Parts:
    """The sum of parts, added to the first of them."""
    first = parts[0]
    for other in parts[1:]:
        first.often.add_(other.often)
        if first.seldom is not None and other.seldom is not None:
            first.seldom.add_(other.seldom)
    return first
