"""The page of a two-layer study: rates beside the orders of theory, defenses, privacy, and every cell."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_recon.bounds.rates import RATES, log_slope
from lit_recon.experiments.two_layer.results import LOCAL, SYMBOLS, Study, TwoLayerCellScores
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Panel, picture, render
from lit_recon.reporting.plots import COLOURS, MARKS, new_figure, svg
from lit_recon.reporting.provenance import environment, paper_of
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.wording import ABSENT

_GREY = "#6b7280"
#: Bounds in the drawing: key, words, line.
_BOUNDS = (("unit_norm", "Cramér-Rao, norms known", "-"), ("relaxed", "relaxed by the trace", ":"))


def rate_curves(study: Study, kind: str = "svg") -> bytes:
    """Errors of all attacks and the bounds over d, m, B and s, without a defense; both axes logarithmic.

    Args:
        study: with at least one sweep of two values.
        kind: `svg` or `png`.
    """
    axes = [axis for axis in SYMBOLS if len(study.sweep(axis)) > 1]
    figure = new_figure(8.6, 3.5 * math.ceil(len(axes) / 2))
    panels = figure.subplots(math.ceil(len(axes) / 2), 2, squeeze=False, sharey=True).ravel()
    for panel, axis in zip(panels, axes, strict=False):
        _draw(panel, study, axis)
    for panel in panels[len(axes) :]:
        panel.set_visible(False)
    for panel in panels[::2]:
        panel.set_ylabel("root mean squared error of an input")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    if kind == "svg":
        return svg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def strength_curves(study: Study) -> bytes:
    """How many times larger each defense makes the bound (lines) and each attack's error (marks), by strength (SVG).

    Of defenses at two strengths or more.
    """
    names = [name for name in study.defenses if len(study.strengths(name)) > 1]
    columns = 2 if len(names) <= 4 else 3
    rows = max(1, math.ceil(len(names) / columns))
    figure = new_figure(8.6, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, name in zip(panels, names, strict=False):
        cells = study.strengths(name)
        places = [cell.strength or 0.0 for cell in cells]
        _style(panel, str(study.defenses[name]["title"]))
        panel.set_yscale("log")
        panel.axhline(
            study.base.bound("unit_norm"), color=_GREY, linewidth=1, linestyle="--", label="bound, no defense"
        )
        panel.plot(places, [_shown(cell, "unit_norm") for cell in cells], color="black", marker=".", label="bound")
        for index, (attack, title) in enumerate(study.attacks.items()):
            values = [cell.error(attack) or math.nan for cell in cells]
            style = {"marker": MARKS[index], "color": COLOURS[index], "markersize": 5, "linewidth": 0.8}
            panel.plot(places, values, label=title, **style)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return svg(figure)


def _draw(panel: Any, study: Study, axis: str) -> None:
    cells = study.sweep(axis)
    places = [cell.sizes[axis] for cell in cells]
    _style(panel, f"over {SYMBOLS[axis]}")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel(SYMBOLS[axis])
    panel.set_xticks(places, [f"{place:g}" for place in places])
    panel.minorticks_off()
    for key, words, line in _BOUNDS:
        panel.plot(
            places, [_shown(cell, key) for cell in cells], color="black", linewidth=1.2, linestyle=line, label=words
        )
    panel.plot(
        places,
        [cell.van_trees for cell in cells],
        color=_GREY,
        linewidth=1.2,
        linestyle="--",
        label="van Trees, any attack",
    )
    series = {**study.attacks, "likelihood": "maximum likelihood, from the truth"}
    for index, (name, title) in enumerate(series.items()):
        values = [cell.error(name) or math.nan for cell in cells]
        colour = _GREY if name == "likelihood" else COLOURS[index]
        panel.plot(
            places,
            values,
            marker="+" if name == "likelihood" else MARKS[index],
            color=colour,
            markersize=6,
            markerfacecolor="none",
            linewidth=0,
            label=title,
        )


def _style(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _shown(cell: TwoLayerCellScores, bound: str) -> float:
    value = cell.bound(bound)
    return value if math.isfinite(value) else math.nan


#: Bounds whose slopes are shown, in words.
_SLOPES = {"unit_norm": "Cramér-Rao bound", "relaxed": "relaxed bound"}


def write_page(folder: Path) -> Path:
    """Write the page, the table and the drawings of a study into its folder, from the files of its cells alone.

    Raises:
        MissingDataError: the folder holds no study.
        CorruptFileError: one of its files is malformed.
    """
    study = Study.read(folder)
    rates = rate_curves(study)
    figures = folder / "figures"
    write_bytes(figures / "rates.svg", rates)
    write_bytes(figures / "rates.png", rate_curves(study, "png"))
    panels = [_rates(study, rates), _orders(study)]
    if study.defenses:
        drawn = any(len(study.strengths(name)) > 1 for name in study.defenses)
        drawing = strength_curves(study) if drawn else b""
        if drawn:
            write_bytes(figures / "defenses.svg", drawing)
        panels.append(_defenses(study, drawing))
    panels += [*_privacy(study), _applies(), _cells(study)]
    write_text(folder / "bounds.csv", study.csv_text())
    facts = environment()
    page = render(
        "study.html.j2",
        name=str(study.settings.get("name") or folder.resolve().name),
        paper=paper_of(study.settings),
        findings=study.summary(),
        panels=panels,
        settings=flatten(study.settings),
        created=str(facts.get("created") or ""),
        version=str(facts.get("version_lit_recon") or ""),
    )
    target = folder / "report.html"
    write_text(target, page)
    return target


def _rates(study: Study, drawing: bytes) -> Panel:
    sizes = ", ".join(f"{symbol} = {study.base.sizes[axis]:g}" for axis, symbol in SYMBOLS.items())
    return Panel(
        "Errors and bounds",
        "Root of the squared distance of an input of norm 1 to what was recovered, up to order and sign. One "
        "quantity is "
        f"varied, the others stay at {sizes}. Solid: no unbiased attack that knows the norms comes below. Grey dashes: "
        "no attack at all, on average over inputs from N(0, I/d). Crosses: maximum likelihood started at the truth, no "
        "attack, but it shows that the bound can be met.",
        pictures=[(picture(drawing, "svg"), "Errors of attacks and bounds over d, m, B and s")],
    )


def _orders(study: Study) -> Panel:
    """For every defense its attacks and bounds: the order that theory gives, and the measured exponents."""
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
        "An "
        "order bounds the attack from above or any attack from below, up to logarithms: the tensor method's exponents "
        "need not be +½ in d, −½ in m and +1 in B, but a bound's of +½, −½, 0 and +1 in s should show.",
        header=["", "Order", *SYMBOLS.values()],
        rows=rows,
        note="Where an error is of the size of the inputs themselves, about 1, it grows no further. The order of the "
        "lower "
        "bound comes from the trace of the information, as does the relaxed bound. The Cramér-Rao bound grows with B "
        "too, "
        "since more examples are harder to tell apart.",
    )


def _slope(study: Study, axis: str, series: str, defense: str, strength: float | None) -> str:
    xs, ys = study.points(study.sweep(axis, defense, strength), axis, series)
    if len(set(xs)) < 2 or len(xs) < 3:
        return ABSENT
    found = log_slope(xs, ys)
    return f"{found.value:+.2f} ± {found.high - found.value:.2f}"


def _defenses(study: Study, drawing: bytes) -> Panel:
    rows = [
        [
            f"{family['title']} {cell.strength:g}",
            _number(cell.bound("unit_norm")),
            _factor(cell.bound("unit_norm") / study.base.bound("unit_norm")),
            _predicted(str(family["rate"]), cell),
            _number(cell.van_trees),
            *(_number(cell.error(attack)) for attack in study.attacks),
        ]
        for name, family in study.defenses.items()
        for cell in study.strengths(name)
    ]
    return Panel(
        "Defenses",
        "What each defense adds to the bound, at the same noise s, beside what the order predicts from its strength: "
        "1/√(1−p) for dropout, |g|/S for clipping, and 1/√(1−P') for pruning, P' being the share of the Jacobian's "
        "squared norm that it takes away. Optimal Gradient Noise and DP-SGD have noise of their own.",
        pictures=[(picture(drawing, "svg"), "Bound and errors of attacks by strength of each defense")]
        if drawing
        else [],
        header=["Defense", "Bound", "× no defense", "Order", "van Trees", *study.attacks.values()],
        rows=rows,
        note="An attack far above the bound says nothing for the defense: a better attack may exist. Masks and "
        "variances "
        "count as fixed; what a choice of coordinates by magnitude tells by itself is left out of these bounds. Local "
        "steps were attacked as if they were one gradient.",
    )


def _predicted(rate: str, cell: TwoLayerCellScores) -> str:
    kept = sum(cell.kept_share) / len(cell.kept_share)
    clip = sum(cell.clip) / len(cell.clip)
    factors = {
        "dropout": 1 / math.sqrt(1 - (cell.strength or 0.0)) if (cell.strength or 0.0) < 1 else math.inf,
        "pruning": 1 / math.sqrt(kept) if kept > 0 else math.inf,
        "clipping": 1 / clip,
        "local_steps": 1.0,
    }
    return _factor(factors[rate]) if rate in factors else ABSENT


def _privacy(study: Study) -> list[Panel]:
    if not study.privacy:
        return []
    first = study.privacy[0]
    return [
        Panel(
            "What differential privacy would ask for",
            "Noise on every coordinate that makes the summed gradient of the base network (ε, "
            f"{study.delta:g})-private when "
            f"one example is replaced, its sensitivity being at most {first['sensitivity']:.3g}: by the moments "
            "accountant "
            "(proposition A.1) and exactly. What it does to the gradient is the noise's norm over the gradient's.",
            header=["ε", "s, moments", "s, exact", "Noise over gradient", "Cramér-Rao bound"],
            rows=[
                [
                    f"{row['epsilon']:g}",
                    _number(row["noise_moments"]),
                    _number(row["noise"]),
                    _number(row["noise_over_gradient"]),
                    _number(row["bound"]),
                ]
                for row in study.privacy
            ],
            note="Inputs have norm 1: a bound above 1 says that nothing is left to reconstruct. Noise many times as "
            "long "
            "as the gradient leaves nothing to learn from either.",
        )
    ]


def _applies() -> Panel:
    return Panel(
        "Which bound holds for whom",
        header=["Bound", "No better can be"],
        rows=[
            ["Cramér-Rao", "an attack whose answers are right on average, near the truth"],
            ["Cramér-Rao, norms known", "the same, if it knows that every input has norm 1, as the attacks here do"],
            ["relaxed", "as Cramér-Rao; weaker, from the trace of the information; what the orders are about"],
            ["van Trees", "any attack, biased or not, on average over inputs from N(0, I/d)"],
        ],
        note="An attack that always answers 0 has error 1 whatever the noise: it is biased, and below any Cramér-Rao "
        "bound "
        f"above 1. Attacks are therefore held against that bound only where it is below {LOCAL:g}. The van Trees "
        "bound is "
        "for Gaussian inputs; those here lie on the unit sphere, where a Gaussian in so many dimensions nearly lies "
        "too.",
    )


def _cells(study: Study) -> Panel:
    names = [*study.attacks, "likelihood"]
    titles = [*study.attacks.values(), "Max. likelihood"]
    below = {(id(cell), name) for cell, name in study.below()}
    return Panel(
        "Every cell",
        header=["Defense", *SYMBOLS.values(), "Cramér-Rao", "norms known", "van Trees", *titles],
        rows=[
            [
                study.defenses[cell.defense]["title"] + f" {cell.strength:g}" if cell.strength is not None else "none",
                *(f"{cell.sizes[axis]:g}" for axis in SYMBOLS),
                _number(cell.bound("exact")),
                _number(cell.bound("unit_norm")),
                _number(cell.van_trees),
                *(_number(cell.error(name)) + (" (below)" if (id(cell), name) in below else "") for name in names),
            ]
            for cell in study.cells
        ],
        note=_notes(study.cells),
        folded=True,
    )


def _notes(cells: Sequence[TwoLayerCellScores]) -> str:
    return " ".join(f"{note[:1].upper()}{note[1:]}." for note in dict.fromkeys(n for cell in cells for n in cell.notes))


def _number(value: float | None) -> str:
    if value is None:
        return ABSENT
    return "∞" if value == math.inf else f"{value:.2g}"


def _factor(value: float) -> str:
    return "∞" if value == math.inf else f"× {value:.3g}"
