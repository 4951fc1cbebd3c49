"""Seconds and accuracy of feature recovery from the gradient of a wide random layer.

    python -m benchmarks.features [--dimensions 512] [--neurons 4096] [--batches 1 8] [--rounds 5] [--threads 1]

Synthetic features behave like centered pooled features behind a ReLU, labels are distinct, gradients are in single
precision. Seconds are of processor time, whole recoveries, compared with the span alone, which every method needs.
"""

from __future__ import annotations

import argparse
import resource
import time
from functools import partial

import torch
from torch import Tensor

from benchmarks.record import Record, Row, alternate, ratios, spread
from lit_recon.attacks.updates.features.activations import GELU, RELU, Activation
from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import FeatureRecovery, LayerGradient
from lit_recon.attacks.updates.features.moments import MomentRecovery, weight_span
from lit_recon.metrics import feature_cosines, span_error


def layer(activation: Activation, n: int, d: int, m: int, seed: int) -> tuple[LayerGradient, Tensor]:
    """Gradient of a layer of `m` neurons and a head of ten classes for `n` distinct labels, and the true features."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(d, generator=generator).abs()
    images = (mean + 0.7 * torch.randn(500 + n, d, generator=generator)).relu()
    features = torch.nn.functional.normalize(images[500:] - images[:500].mean(dim=0), dim=1)
    weight, head = torch.randn(m, d, generator=generator), torch.randn(10, m, generator=generator) / m
    z = features @ weight.T
    deltas = torch.softmax(activation.value(z) @ head.T, dim=1)
    deltas[torch.arange(n), torch.randperm(10, generator=generator)[:n]] -= 1
    back = (deltas @ head) * activation.slope(z)
    seen = LayerGradient(
        weight=weight.double(),
        bias=torch.zeros(m, dtype=torch.float64),
        head_weight=head.double(),
        head_bias=torch.zeros(10, dtype=torch.float64),
        weight_gradient=(back.T @ features).double(),
        bias_gradient=back.sum(dim=0).double(),
        head_gradient=(deltas.T @ activation.value(z)).double(),
        activation=activation,
        gaussian=torch.ones(m, dtype=torch.bool),
        n_examples=n,
    )
    return seen, features


def measure(activation: Activation, n: int, d: int, m: int, rounds: int, seed: int) -> Row:
    """Seconds and errors of one cell."""
    seen, truth = layer(activation, n, d, m, seed)
    methods: dict[str, FeatureRecovery] = {
        "moments": MomentRecovery(),
        "moments_control_variates": MomentRecovery(control_variates=True),
        "exact": ExactRecovery(),
    }
    variants = {name: partial(method.recover, seen) for name, method in methods.items()}
    seconds = alternate({"span": partial(weight_span, seen.weight_gradient, n), **variants}, rounds, time.process_time)
    found = {name: run() for name, run in variants.items()}
    return {
        "activation": activation.name,
        "batch": n,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": ratios(seconds, "span"),
        "span_error": {name: float(span_error(r.span.T, truth).mean()) for name, r in found.items()},
        "worst_one_minus_cosine": {
            name: 1 - float(feature_cosines(r.features, truth).min()) for name, r in found.items()
        },
        "certificate": found["exact"].certificate,
        "start": found["exact"].method,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--neurons", type=int, default=4096)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = arguments.dimensions, arguments.neurons, arguments.rounds, arguments.seed
    with Record("features", vars(arguments)) as record:
        for activation in (GELU, RELU):
            for n in arguments.batches:
                record.measure({"activation": activation.name, "batch": n}, partial(measure, activation, n, *size))


if __name__ == "__main__":
    main()
