"""Labels of decoded images, from the layer by which an imprint block talks to the network behind it.

The gradient of that layer's weight is a product, V^T A: of the derivatives V `(n, d)` of every image's loss with
respect to what the network sees, and of the activations A `(n, m)` of the block's neurons, which the decoded images
tell. So V is known image by image. Its direction depends on the label, and no clipping of single examples turns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.inversion.first_layer import derivatives, log_misfit, to_inputs
from lit_recon.models.imprint import ImprintBlock
from lit_recon.records import Observation

#: The best label must explain so much more of a derivative than the second, to be taken for certain.
CLEARLY = 0.1


def labels_told(
    decoded: Tensor, labels: Tensor, name: str, block: ImprintBlock, seen: Observation
) -> tuple[Tensor, Tensor]:
    """Labels to be assigned to images, and what the directions of derivatives say of them.

    Labels that were given are all there are. Counts may be wrong, where a defense has changed the gradient that they
    were read off: labels that derivatives tell beyond them are added.

    Args:
        decoded: `(j, c, h, w)` in [0, 1]: decoded images, at most one per bin.
        labels: `(n,)`, given or counted.
        name: of the block.
        block: itself.
        seen: the observation.

    Returns:
        Labels `(l,)` with `l >= n`, and costs `(n, l)`: 0 in rows of images whose label is not told for certain.
    """
    known = seen.labels is not None
    classes = labels.unique() if known else torch.arange(seen.n_classes, device=labels.device)
    explained = _explained(decoded, classes, name, block, seen)
    best = torch.cat([explained, explained.new_zeros(len(decoded), 1)], dim=1).topk(2, dim=1)
    certain = best.values[:, 0] - best.values[:, 1] > CLEARLY
    if not known:
        told, counted = (
            torch.bincount(found.cpu(), minlength=seen.n_classes) for found in (best.indices[certain, 0], labels)
        )
        labels = torch.cat([labels, classes.repeat_interleave((told - counted).clamp(min=0).to(labels.device))])
    costs = log_misfit((1 - explained).sqrt())[:, torch.searchsorted(classes, labels).cpu()]
    evidence = costs.new_zeros(seen.n_examples, len(labels))
    evidence[: len(decoded)] = torch.where(certain[:, None], costs, 0.0)
    return labels, evidence


def _explained(images: Tensor, classes: Tensor, name: str, block: ImprintBlock, seen: Observation) -> Tensor:
    """Share `(j, q)` of each image's squared derivative that is as it would be with each of the labels."""
    if not len(images):
        return torch.zeros(0, len(classes), dtype=torch.float64)
    weight, bias = (seen.parameters[f"{name}.measure.{part}"].detach().cpu().double() for part in ("weight", "bias"))
    active = block.activate(to_inputs(images.double(), seen) @ weight.T + bias)
    gradient = seen.update[f"{name}.spread.weight"].detach().cpu().double()
    observed = torch.linalg.lstsq(active.T, gradient.T, driver="gelsd").solution
    expected = torch.stack(
        [derivatives(images, label.expand(len(images)), f"{name}.spread.bias", seen) for label in classes], dim=1
    )
    cosines: Tensor = torch.nn.functional.cosine_similarity(expected, observed[:, None], dim=2)
    return cosines.clamp(min=0, max=1).square()
