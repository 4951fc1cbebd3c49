"""Shadow models of any network from some of the fixed images per step, corrected along the reference's path.

A model trained on the fixed set and one image stays close to the reference, which is trained on the fixed set alone, at
`theta_t` before step t. The fixed set's gradient `G` differs little between the two. That difference is estimated on
`s` of the `n` fixed images, S; the gradient `g` of the model's own image is exact:

    v <- momentum v + (n / s (G_S(theta_t + delta) - G_S(theta_t)) + g(theta_t + delta)) / (n + 1),
    delta <- delta - lr v

With all images the models are exact. The images of a step have the labels of the fixed set in equal shares, and n / s
steps use every image once: one step's error is made up for by the next ones.

Source: ours; the control variate is that of [Johnson2013].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from lit_recon.attacks.shadow.steps import Descent
from lit_recon.attacks.shadow.training import KnownTraining, cross_entropy, full_precision, of_own_images
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ShapeError

#: Fixed images, and models with their own image, whose gradients are computed at a time.
_FIXED, _OWN = 1_000, 64


def respond_by_samples(known: KnownTraining, path: Tensor, images: Tensor, labels: Tensor, n_images: int) -> Tensor:
    """Differences `(s, p)` of shadow models with these images `(s, c, h, w)` and labels from `train_reference`.

    A model does not depend on the others. ShapeError: arguments that do not fit, or a training that diverged.

    Args:
        known: the training, by full batches.
        path: weights of the reference before each step, `(t, p)`.
        images, labels: of the shadow models, one each.
        n_images: most fixed images of a step.
    """
    known.check(path[0], images, labels)
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = grad(partial(cross_entropy, known.network, reduction="sum"))
    samples = balanced_samples(known.labels, n_images)
    with full_precision(), torch.no_grad():
        moved = images.new_zeros(len(images), known.n_parameters)
        descent = Descent(known.descent, [moved])
        for weights, sample in zip(path, samples, strict=False):
            change = of_own_images(gradient, weights + moved, images, labels, _OWN)
            factor = len(known.images) / len(sample)
            for some in sample.split(_FIXED):
                fixed = known.images[some], known.labels[some]
                before = gradient(weights, *fixed)
                for own, delta in zip(change, moved, strict=True):
                    own.add_(gradient(weights + delta, *fixed) - before, alpha=factor)
            descent.step([change], scale=1 / (len(known.images) + 1))
    if not torch.isfinite(moved).all():
        raise ShapeError(
            "the approximation diverged to NaN or infinity: raise linear.hessian_images, lower descent.lr, or set "
            "shadows to exact"
        )
    return moved


def n_samples(n: int, size: int) -> int:
    """Samples, of nearly equal size and at most `size` images, that `n` images are divided into."""
    return -(-n // size)


def balanced_samples(labels: Tensor, size: int) -> Iterator[Tensor]:
    """Positions `(at most size,)` of images, without end: all once before one comes again, labels in equal shares."""
    n = len(labels)
    parts, passes = n_samples(n, size), 0
    while True:
        generator = seeded_generator(passes, "samples")
        shuffled = torch.randperm(n, generator=generator).to(labels.device)
        by_label = shuffled[torch.argsort(labels[shuffled], stable=True)]
        for part in torch.randperm(parts, generator=generator).tolist():
            yield by_label[part::parts]
        passes += 1
