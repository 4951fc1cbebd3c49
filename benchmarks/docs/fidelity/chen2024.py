"""Items of Chen, Gürsoy, Lei: Optimal Defenses Against Gradient Reconstruction Attacks, 2024.

We hold no text of this paper: its tables and figures are unknown here. Items are the comparisons that its public code
can run.
"""

from __future__ import annotations

from benchmarks.docs.fidelity.items import Item
from benchmarks.docs.fidelity.liu2025 import under_bound, under_grid

_UNKNOWN = "not known"
#: Settings of the public code.
_NETWORKS = {
    "MNIST": "batches of 16, a small network with LeakyReLU, 2,000 iterations of gradient inversion",
    "CIFAR-10": "batches of 2, an untrained ConvNet, 1,000 iterations of gradient inversion",
}
_DEFENSES = {
    "OptimalGradientNoise": "optimal gradient noise against plain noise",
    "OptimalGradientPruning": "optimal gradient pruning against pruning by size, fractions of 0.1 to 0.7",
    "clamped": "clamped coordinates with optimal gradient noise against the same with plain noise",
}
_IMPLEMENTED = ("OptimalGradientNoise", "OptimalGradientPruning")


def _needs(defense: str) -> str:
    if defense in _IMPLEMENTED:
        return f"a configuration for this setting, of which there is none; the defense is `{defense}`"
    return "the defense, which is not implemented, and a configuration"


_COMPARISONS = tuple(
    Item(f"code, {data}", f"MSE and PSNR, {words}: {setting}", _UNKNOWN, needs=_needs(defense))
    for data, setting in _NETWORKS.items()
    for defense, words in _DEFENSES.items()
)
_REST = (
    Item(
        "code",
        "rounding in steps of the optimal noise's size",
        _UNKNOWN,
        needs="the defense, which is not implemented, and a configuration",
    ),
    Item(
        "code, MNIST",
        "training behind each defense: 4,096 images, 3 epochs, four clients to a batch",
        _UNKNOWN,
        needs="a configuration for `train.py backbone`; both defenses are available there",
    ),
    Item(
        "code, CIFAR-10",
        "training behind each defense: 8 images, 10 epochs",
        _UNKNOWN,
        needs="a configuration for `train.py backbone`; 8 images tell little of a loss in accuracy",
    ),
)
_GRID = tuple(
    Item(
        "setting of Liu et al.",
        f"RMSE and accuracy behind {words} {strength:g}",
        _UNKNOWN,
        ours=under_grid(defense, strength),
        setting="CIFAR-10, ResNet-18 with a wide layer, 4 single images, networks that see 10,000 images once",
        needs=f'`configs/evaluate/liu2025_table4_small.yaml` with `--only "[{defense}_{strength:g}]"`',
    )
    for defense, words, strengths in (
        ("optimal_noise", "optimal gradient noise", (0.001, 0.01, 0.1)),
        ("optimal_pruning", "optimal gradient pruning", (0.5, 0.9, 0.99)),
    )
    for strength in strengths
)
_BOUNDS = tuple(
    Item(
        "bound",
        f"lower bound on the error of unbiased attacks behind {words}",
        _UNKNOWN,
        ours=under_bound(defense),
        setting="random two-layer networks, inputs on the unit sphere",
        needs="`configs/bounds/two_layer_small.yaml`, minutes on one core",
        other_data=True,
    )
    for defense, words in (("ogn", "optimal gradient noise"), ("ogp", "optimal gradient pruning"))
)
ITEMS = (*_COMPARISONS, *_REST, *_GRID, *_BOUNDS)
