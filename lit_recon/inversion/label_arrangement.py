"""Which label belongs to which reconstructed image, where the images were found without looking at labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_recon.inversion.head import find_head
from lit_recon.observation.norms import pure_copy
from lit_recon.records import Observation


def arranged_labels(observation: Observation, images: Tensor, labels: Tensor) -> Tensor:
    """The labels `(n,)` in the order of reconstructed images `(n, c, h, w)`.

    The gradient of the head's weights is the mean over examples of (p_i - y_i) h_i^T. Head inputs h_i and probabilities
    p_i follow from the images, so that the indicators y_i of the labels solve a linear system; an assignment makes the
    most of the solution where images are inexact.

    Args:
        observation: of the victim; one gradient.
        images: in [0, 1].
        labels: of the batch, in any order.
    """
    from scipy.optimize import linear_sum_assignment

    if len(labels) == 1:
        return labels
    weight, _ = find_head(observation.model, observation.n_classes)
    model = pure_copy(observation.model, observation.operator.batch_norm)
    seen: list[Tensor] = []
    model.get_submodule(weight.rpartition(".")[0]).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        logits = torch.func.functional_call(model, {**observation.parameters, **observation.buffers}, (images,))
    inputs, probabilities = seen[0].double().cpu(), nn.functional.softmax(logits.double().cpu(), dim=1)
    gradient = observation.update[weight].double().cpu()
    # p_i - y_i for every example, from n G = sum_i (p_i - y_i) h_i^T
    residuals = torch.linalg.lstsq(inputs.T, len(labels) * gradient.T, driver="gelsd").solution
    indicators = probabilities - residuals
    rows, columns = linear_sum_assignment(-indicators[:, labels.cpu()].numpy())
    order = torch.empty(len(labels), dtype=torch.int64)
    order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return labels[order.to(labels.device)]
