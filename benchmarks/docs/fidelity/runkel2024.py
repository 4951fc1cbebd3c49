"""Items of Runkel et al.: Training Data Reconstruction: Privacy due to Uncertainty?, 2024.

We hold a summary of this paper, which names no table, figure or number. Items are the experiments that it describes.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.docs.fidelity.items import Found, Item, newest
from benchmarks.docs.figures import Content, Figures, shown
from benchmarks.docs.tables import metrics_of
from benchmarks.docs.trainset import answers

_NETWORKS = {
    "affine": ("affine classifier", "20 images of CIFAR-10 in two classes, two restarts, three trainings"),
    "mlp": ("network with one hidden layer", "10 images of CIFAR-10 in two classes, 50 neurons, two trainings"),
}
_PROTOCOL = "the paper's sizes are not known to us"
_ATTACKS = ("bilevel", "unrolled", "damped", "stationarity")
_STARTS = {
    "random noise": ("noise_0", "often images that look valid and were not trained on"),
    "other images of the data": ("other_0", "stays near the start, at a small parameter distance"),
    "the training images (the best step counts, which may be the start)": ("mixture_1", "converges"),
}
_SHARES = ("noise_0", "mixture_0.25", "mixture_0.75", "mixture_1")
#: Hypotheses as records name them by how they begin: what the paper says, and whether all trainings must be compared.
_HYPOTHESES = {
    "Starts that look real": "realistic starts converge quickly, without resembling the training data",
    "Random starts": "random starts can give valid images that were not trained on",
    "The uncertainty": "an adversary cannot tell which reconstructions are of training images",
    "The landscape": "conjecture: the landscape of the stationarity conditions is a smoother one with fewer minima",
}


def _by_attack(name: str, cell: Callable[[Content, str], str]) -> Callable[[Figures], Found | None]:
    """A cell for every attack of a study."""

    def compute(figures: Figures) -> Found | None:
        record = newest(figures, name)
        cells = [f"{attack} {text}" for attack in _ATTACKS if record and (text := cell(record, attack))]
        return Found("; ".join(cells), [record]) if record and cells else None

    return compute


def _start(start: str) -> Callable[[Content, str], str]:
    """RMSE to the nearest training image, and what is left of the parameter distance, or of the stationarity."""

    def cell(record: Content, attack: str) -> str:
        found, key = metrics_of(record), f"{attack}.{start}.none"
        if found.get(f"rmse.{key}") is None:
            return ""
        kind = "distance" if found.get(f"distance_before.{key}") is not None else "stationarity"
        before, after = (shown(found.get(f"{kind}_{end}.{key}"), ".2g") for end in ("before", "after"))
        words = "parameter distance" if kind == "distance" else "stationarity"
        return f"RMSE {shown(found[f'rmse.{key}'])}, {words} {before} to {after}"

    return cell


def _nearer(record: Content, attack: str) -> str:
    found = metrics_of(record)
    shares = [found.get(f"closer_rmse.{attack}.{start}_0.none") for start in ("noise", "other")]
    return "" if None in shares else " and ".join(shown(share, ".0%") for share in shares)


def _landscape(record: Content, attack: str) -> str:
    found = metrics_of(record)
    kind = "distance" if found.get(f"distance_before.{attack}.noise_0.none") is not None else "stationarity"
    values = [found.get(f"{kind}_before.{attack}.{start}.none") for start in _SHARES]
    return "" if None in values else ", ".join(shown(value, ".2g") for value in values)


def _answers(beginning: str) -> Callable[[Content, str], str]:
    """Every comparison of a hypothesis: its value, half of the interval, and the answer."""

    def cell(record: Content, attack: str) -> str:
        rows = [row for row in answers(record) if row["attack"] == attack and _begins(row["hypothesis"], beginning)]
        return ", ".join(
            f"{row['answer']} ({shown(row['difference'], '.2g')}"
            + ("" if row.get("half") is None else f" ± {shown(row['half'], '.2g')}")
            + ")"
            for row in rows
        )

    return cell


def _begins(text: object, beginning: str) -> bool:
    return str(text).startswith(beginning)


def _items(name: str) -> tuple[Item, ...]:
    """The experiments on one network."""
    title, size = _NETWORKS[name]
    record, needs = f"trainset_runkel2024_{name}", f"`configs/trainset/runkel2024_{name}.yaml`"
    setting = f"{size}; {_PROTOCOL}"
    return (
        *(
            Item(
                title,
                f"reconstruction from {words}",
                said,
                ours=_by_attack(record, _start(start)),
                setting=setting,
                needs=needs,
            )
            for words, (start, said) in _STARTS.items()
        ),
        Item(
            title,
            "value that is minimized at starts with 0, 25, 75 and 100 % of the truth",
            "plot without numbers here: it grows with the share of noise, quicker in the bilevel problem",
            ours=_by_attack(record, _landscape),
            setting=setting,
            needs=needs,
        ),
        Item(
            title,
            "candidates nearer to a training image than to any of as many others, from noise and from other images",
            "nearest neighbours, no numbers here",
            ours=_by_attack(record, _nearer),
            setting=setting,
            needs=needs,
        ),
        *(
            Item(
                f"{title}, conclusion",
                "agreement with it, by the differences in [training_sets.md](training_sets.md)",
                said,
                ours=_by_attack(record, _answers(beginning)),
                setting=setting,
                needs=f"{needs} with more restarts, over which this one is compared"
                if (name, beginning) == ("mlp", "The uncertainty")
                else needs,
            )
            for beginning, said in _HYPOTHESES.items()
        ),
    )


ITEMS = (
    *_items("affine"),
    *_items("mlp"),
    Item(
        "tables and figures",
        "by number, with printed values",
        "not known: we hold a summary only",
        needs="the paper's text",
    ),
)
