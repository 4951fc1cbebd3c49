"""Items of Chen, Gürsoy, Lei: Optimal Defenses Against Gradient Reconstruction Attacks, 2024.

We hold no text of this paper: its tables and figures are unknown here. Items are the comparisons that its public code
can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.docs import study
from benchmarks.docs.fidelity.items import Found, Item, rows_of
from benchmarks.docs.fidelity.liu2025 import Compute, under_bound, under_grid
from benchmarks.docs.figures import Figures, shown
from benchmarks.docs.tables import configuration, select

_UNKNOWN = "not known"
#: Settings of the public code.
_NETWORKS = {
    "MNIST": (
        "batches of 16, in its last version of 8, a small network with LeakyReLU, 2,000 iterations of gradient "
        "inversion"
    ),
    "CIFAR-10": "batches of 2, an untrained ConvNet, 1,000 iterations of gradient inversion",
}
_DEFENSES = {
    "OptimalGradientNoise": "optimal gradient noise against plain noise",
    "OptimalGradientPruning": "optimal gradient pruning against pruning by size, fractions of 0.1 to 0.7",
    "clamped": "clamped coordinates with optimal gradient noise against the same with plain noise",
}
#: The configuration of the setting of the code by data, what ours changes, and its defenses for each comparison.
_GRIDS = {
    "MNIST": (
        "chen2024_mnist",
        "4 batches of 8 images; three trainings of one client by SGD",
    )
}
_COMPARED = {
    "OptimalGradientNoise": ("noise", "optimal_noise", "optimal_noise_energy"),
    "OptimalGradientPruning": ("prune", "optimal_pruning"),
}


def _needs(data: str, defense: str) -> str:
    if defense not in _COMPARED:
        return "the defense, which is not implemented, and a configuration"
    if data in _GRIDS:
        return f"`configs/evaluate/{_GRIDS[data][0]}.yaml`, an hour and a half of one core"
    return f"a configuration for this setting, of which there is none; the defense is `{defense}`"


def _found(data: str, names: Sequence[str], table: str) -> Compute | None:
    """Errors of attacks behind these defenses (`evaluation`), or accuracies and losses of trainings (`utility`)."""
    if data not in _GRIDS or not names:
        return None
    own = _GRIDS[data][0]

    def compute(figures: Figures) -> Found | None:
        records = [one for one in figures.find(f"all {own}**") if any(rows_of(one, table, defense=n) for n in names)]
        families, cells = configuration(f"evaluate/{own}.yaml")["defenses"], []
        for name in names:
            rows = select(study._rows(records, table), defense=name)
            strengths = sorted({row["strength"] for row in rows})
            told = [f"{one:g}: {text}" for one in strengths if (text := _told(select(rows, strength=one), table))]
            if not told:
                return None
            cells.append(f"{families[name]['title']}: {'; '.join(told)}")
        return Found(". ".join(cells), records)

    return compute


def _told(rows: Sequence[Mapping[str, Any]], table: str) -> str:
    """The trainings, or the attack, at one strength; empty where it was not run."""
    if table == "utility":
        return f"{study._spread(rows, 'accuracy', '.1%')}, loss {study._spread(rows, 'final_train_loss', '.2f')}"
    [row] = rows
    return "" if row.get("mse") is None else f"MSE {shown(row['mse'], '.4f')}, {shown(row['psnr'], '.1f')} dB"


_COMPARISONS = tuple(
    Item(
        f"code, {data}",
        f"MSE and PSNR, {words}: {setting}",
        _UNKNOWN,
        ours=_found(data, _COMPARED.get(defense, ()), "evaluation"),
        setting=_GRIDS.get(data, ("", ""))[1],
        needs=_needs(data, defense),
    )
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
        ours=_found("MNIST", [name for names in _COMPARED.values() for name in names], "utility"),
        setting=_GRIDS["MNIST"][1],
        needs=_needs("MNIST", "OptimalGradientNoise"),
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
