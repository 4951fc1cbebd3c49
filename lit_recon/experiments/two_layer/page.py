"""The page of a two-layer study: errors and bounds, orders, defenses, privacy, and every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lit_recon.bounds.two_layer import RATES, log_slope
from lit_recon.experiments.two_layer.results import LOCAL, SYMBOLS, Study, TwoLayerCellScores
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Page, Panel, Picture
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series, draw
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.wording import ABSENT, short, strength_in_words

#: Bounds whose slopes are shown, in words.
_SLOPES = {"unit_norm": "Cramér-Rao bound", "relaxed": "relaxed bound"}


def write_page(folder: Path) -> Path:
    """Write the page, the table and the plots of a study, from its files alone; raises as `Study.read` does."""
    study = Study.read(folder)
    *findings, verdict = study.summary()
    write_bytes(folder / "figures" / "rates.png", rate_curves(study, "png"))
    write_text(folder / "bounds.csv", study.csv_text())
    page = Page(
        kind="Attacks and bounds",
        settings=study.settings,
        facts={**environment(), "command": "python attack.py bounds --config config.yaml --out FOLDER"},
        lead=verdict,
        panels=[
            Panel("Findings", items=findings),
            _rates(study),
            _orders(study),
            *([_defenses(study)] if study.defenses else []),
            *_privacy(study),
            _applies(),
            _cells(study),
        ],
        files={
            "bounds.csv": "every draw",
            "cells/": "the results of every cell",
            "figures/": "the plots",
            "config.yaml": "the settings",
        },
    )
    return page.write(folder / "report.html")


def rate_curves(study: Study, kind: str = "svg") -> bytes:
    """Errors of all attacks and the bounds over d, m, B and s, without a defense; `kind` is `svg` or `png`."""
    plots = [_rate_plot(study, axis) for axis in SYMBOLS if len(study.sweep(axis)) > 1]
    return draw(plots, columns=2, size=(4.3, 3.6), kind=kind, shared_y=True)


def _rate_plot(study: Study, axis: str) -> Plot:
    cells, symbol = study.sweep(axis), SYMBOLS[axis]
    places = [cell.sizes[axis] for cell in cells]
    series = [
        Series("Cramér-Rao, norms known", places, _bounds(cells, "unit_norm"), colour="black"),
        Series("relaxed by the trace", places, _bounds(cells, "relaxed"), ":", colour="black"),
        Series("van Trees, any attack", places, [cell.van_trees for cell in cells], "--"),
        *_attacks(study, cells, places, line=""),
        Series("maximum likelihood, from the truth", places, _errors(cells, "likelihood"), "", "+"),
    ]
    scales: dict[str, Any] = {"x_scale": "log", "y_scale": "log", "x_ticks": {f"{place:g}": place for place in places}}
    return Plot(f"over {symbol}", symbol, "root mean squared error of an input", series=series, **scales)


def _strength_plot(study: Study, name: str) -> Plot:
    cells = study.strengths(name)
    places = [cell.strength or 0.0 for cell in cells]
    bound = Series("bound", places, _bounds(cells, "unit_norm"), marker=".", colour="black")
    series = [bound, *_attacks(study, cells, places, width=0.8)]
    levels = {"bound, no defense": study.base.bound("unit_norm")}
    title = str(study.defenses[name]["title"])
    return Plot(title, "strength", "root mean squared error", series=series, levels=levels, y_scale="log")


def _attacks(
    study: Study, cells: Sequence[TwoLayerCellScores], places: Sequence[float], line: str = "-", width: float = 1.3
) -> list[Series]:
    return [
        Series(title, places, _errors(cells, attack), line, MARKS[index], COLOURS[index], width)
        for index, (attack, title) in enumerate(study.attacks.items())
    ]


def _bounds(cells: Sequence[TwoLayerCellScores], name: str) -> list[float]:
    values = [cell.bound(name) for cell in cells]
    return [value if math.isfinite(value) else math.nan for value in values]


def _errors(cells: Sequence[TwoLayerCellScores], attack: str) -> list[float]:
    return [cell.error(attack) or math.nan for cell in cells]


def _rates(study: Study) -> Panel:
    sizes = ", ".join(f"{symbol} = {study.base.sizes[axis]:g}" for axis, symbol in SYMBOLS.items())
    return Panel(
        "Errors and bounds",
        "Root mean squared distance between an input of norm 1 and its reconstruction, up to order and sign. One "
        f"quantity is varied, the others stay at {sizes}. Solid: lower bound for unbiased attacks that know the norms. "
        "Dashed: lower bound for any attack, on average over inputs from N(0, I/d). Crosses: maximum likelihood "
        "started at the truth; it is no attack, but shows that the bound can be reached.",
        [Picture(rate_curves(study), "Errors of attacks and bounds over d, m, B and s", "rates.svg")],
    )


def _orders(study: Study) -> Panel:
    families: dict[str, tuple[str, str, float | None]] = {"none": ("no defense", "none", None)}
    families |= {name: (str(f["title"]), str(f["rate"]), f["at"]) for name, f in study.defenses.items()}
    rows = []
    for name, (title, column, at) in families.items():
        rate = RATES.get(column)
        orders = {} if rate is None else {**dict.fromkeys(study.moments, rate.upper), "relaxed": rate.lower}
        for series, words in {**study.attacks, **_SLOPES}.items():
            varied = name == "none" or at is not None
            slopes = [_slope(study, axis, series, name, at) if varied else ABSENT for axis in SYMBOLS]
            if series in orders or any(slope != ABSENT for slope in slopes):
                shown = title if at is None else f"{title} {at:g}"
                rows.append([f"{shown}: {words}", orders.get(series, ""), *slopes])
    return Panel(
        "Orders and measured exponents",
        "Exponent p of error ~ x^p ± half of its 95 % confidence interval, over all draws, beside the paper's order. "
        "An order bounds the attack from above, or any attack from below, up to logarithms: the tensor method's "
        "exponents need not be +½ in d, −½ in m and +1 in B, but the bound's should be +½, −½, 0 and, in s, +1.",
        header=["", "Order", *SYMBOLS.values()],
        rows=rows,
        note="An error as large as the inputs themselves, about 1, grows no further. The order of the lower bound "
        "comes from the trace of the information, as does the relaxed bound. The Cramér-Rao bound grows with B too, "
        "since more examples are harder to separate.",
    )


def _slope(study: Study, axis: str, series: str, defense: str, strength: float | None) -> str:
    xs, ys = study.points(study.sweep(axis, defense, strength), axis, series)
    if len(set(xs)) < 2 or len(xs) < 3:
        return ABSENT
    found = log_slope(xs, ys)
    return f"{found.value:+.2f} ± {found.high - found.value:.2f}"


def _defenses(study: Study) -> Panel:
    plots = [_strength_plot(study, name) for name in study.defenses if len(study.strengths(name)) > 1]
    pictures = []
    if plots:
        drawn = draw(plots, columns=2 if len(plots) <= 4 else 3, size=(4.3, 3.0))
        pictures.append(Picture(drawn, "Bound and errors of attacks by strength of each defense", "defenses.svg"))
    return Panel(
        "Defenses",
        "The bound under each defense at the same noise s, and the increase that the order predicts from the strength: "
        "1/√(1−p) for dropout, |g|/S for clipping, and 1/√(1−P') for pruning, where P' is the share of the Jacobian's "
        "squared norm that is pruned. Defenses with noise, such as Optimal Gradient Noise and DP-SGD with a noise "
        "multiplier, add theirs instead.",
        pictures,
        header=["Defense", "Bound", "Over no defense", "Order", "van Trees", *study.attacks.values()],
        rows=[
            [
                f"{family['title']} {strength_in_words(cell.strength)}",
                short(cell.bound("unit_norm"), 2),
                _times(cell.bound("unit_norm") / study.base.bound("unit_norm")),
                _predicted(str(family["rate"]), cell),
                short(cell.van_trees, 2),
                *(short(cell.error(attack), 2) for attack in study.attacks),
            ]
            for name, family in study.defenses.items()
            for cell in study.strengths(name)
            if cell.strength is not None
        ],
        note="An attack far above the bound is no evidence for the defense: a better attack may exist. Masks and "
        "variances are taken as fixed; what the choice of coordinates by magnitude reveals is not part of these "
        "bounds. Local steps were attacked as if they were one gradient.",
    )


def _predicted(rate: str, cell: TwoLayerCellScores) -> str:
    # the share of the squared error's information that is kept, by column of the table of orders
    kept = {
        "dropout": max(0.0, 1 - (cell.strength or 0.0)),
        "pruning": fmean(cell.kept_share),
        "clipping": fmean(cell.clip) ** 2,
        "local_steps": 1.0,
    }
    if rate not in kept:
        return ABSENT
    return _times(1 / math.sqrt(kept[rate]) if kept[rate] else math.inf)


def _times(value: float) -> str:
    return f"× {short(value)}"


def _privacy(study: Study) -> list[Panel]:
    if not study.privacy:
        return []
    keys = ("noise_moments", "noise", "noise_over_gradient", "bound")
    return [
        Panel(
            "Noise for differential privacy",
            f"Noise per coordinate that makes the summed gradient of the base network (ε, {study.delta:g})-private "
            f"when one example is replaced, with a sensitivity of at most {short(study.privacy[0]['sensitivity'])}: by "
            "the moments accountant (proposition A.1) and exactly. Noise over gradient: ratio of their norms.",
            header=["ε", "s, moments", "s, exact", "Noise over gradient", "Cramér-Rao bound"],
            rows=[[short(row["epsilon"], 6), *(short(row[key], 2) for key in keys)] for row in study.privacy],
            note="Inputs have norm 1: a bound above 1 means that nothing can be reconstructed. Noise much larger than "
            "the gradient makes training impossible, too.",
        )
    ]


def _applies() -> Panel:
    return Panel(
        "Which bound applies to which attack",
        "Each bounds the errors of these attacks from below.",
        items=[
            ("Cramér-Rao", "unbiased attacks, near the truth"),
            (
                "Cramér-Rao, norms known",
                "unbiased attacks that know that every input has norm 1, as the attacks here do",
            ),
            (
                "relaxed",
                "as Cramér-Rao but weaker, from the trace of the information; the orders are those of this bound",
            ),
            ("van Trees", "any attack, biased or not, on average over inputs from N(0, I/d)"),
        ],
        note="An attack that always answers 0 has error 1 whatever the noise: it is biased, and below any Cramér-Rao "
        f"bound above 1. Attacks are therefore compared with that bound only where it is below {LOCAL:g}. The van "
        "Trees bound is for Gaussian inputs; those here lie on the unit sphere, near which high-dimensional Gaussian "
        "inputs concentrate.",
    )


def _cells(study: Study) -> Panel:
    names = [*study.attacks, "likelihood"]
    titles = [*study.attacks.values(), "Max. likelihood"]
    below = {(id(cell), name) for cell, name in study.below()}
    notes = dict.fromkeys(note for cell in study.cells for note in cell.notes)
    return Panel(
        "All cells",
        header=["Defense", *SYMBOLS.values(), "Cramér-Rao", "norms known", "van Trees", *titles],
        rows=[
            [
                study.defenses[cell.defense]["title"] + f" {strength_in_words(cell.strength)}"
                if cell.strength is not None
                else "none",
                *(f"{cell.sizes[axis]:g}" for axis in SYMBOLS),
                *(short(value, 2) for value in (cell.bound("exact"), cell.bound("unit_norm"), cell.van_trees)),
                *(short(cell.error(name), 2) + (" (below)" if (id(cell), name) in below else "") for name in names),
            ]
            for cell in study.cells
        ],
        note=" ".join(f"{note[:1].upper()}{note[1:]}." for note in notes),
        folded=True,
    )
