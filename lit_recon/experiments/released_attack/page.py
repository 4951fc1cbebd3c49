"""The page of an attack on released models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_recon.reporting.pages import Panel, Picture, build_report
from lit_recon.reporting.plots import Plot, draw
from lit_recon.reporting.provenance import find_setting
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.wording import Grant, short

_ORIGIN = "Left the unknown training image, in the middle what the attack reconstructed from the released model"
#: Reference errors: keys of the record and their names (Balle et al. 2022, figure 3).
_LEVELS = {
    "oracle_mse": "nearest other image",
    "oracle_mse_percentile_1": "nearest 1 %",
    "oracle_mse_percentile_10": "nearest 10 %",
    "oracle_mse_percentile_50": "nearest half",
    "baseline_mean_image_mse": "mean image",
}


def write_page(folder: Path) -> Path:
    """Write the page of a finished run of `reconn.py run`; see `build_report`."""
    return build_report(folder, _ORIGIN, grants, panels)


def panels(record: RunRecord) -> list[Panel]:
    """The errors of all target images beside the distances of other images; nothing for a run without errors."""
    errors = [error for row in record.victims if (error := row.scores.get("mse")) is not None]
    if not errors:
        return []
    levels = {name: value for key, name in _LEVELS.items() if (value := record.number(key)) is not None}
    drawn = error_histogram({"attack": errors}, levels)
    return [
        Panel(
            "Error by target image",
            "Distribution of the attack's squared error over the target images. Vertical lines, each a mean over the "
            "target images: the distance of the nearest other image of the same data; the distances within which 1 %, "
            "10 % and half of all other images lie; and the error of the mean image.",
            [Picture(drawn, "Histogram of the squared errors, and distances of other images")],
        )
    ]


def error_histogram(samples: Mapping[str, Sequence[float]], levels: Mapping[str, float]) -> bytes:
    """Histograms of the squared errors of target images (SVG), with reference errors."""
    labels = ("", "squared error of a target image", "share of the target images")
    return draw([Plot(*labels, samples=samples, levels=levels)], size=(6.8, 3.4))


def grants(record: RunRecord) -> list[Grant]:
    """What the informed adversary knew and did not know."""
    fresh = find_setting(record.settings, "initialization") == "fresh"
    earlier = find_setting(record.settings, "initialization.images")
    which = ": every model, released or shadow, has its own" if fresh else ""
    if earlier is not None:
        which = f": those of a model that was trained on {earlier} other images before"
    seen = record.text("seen") or "what the setting `access` says"
    shadows = Grant(True, f"{record.text('n_shadow')} other images of the same shape, to train shadow models on.")
    if record.number("n_shadow") == 0:
        shadows = Grant(False, "Shadow models of this training set.")
    found = [
        Grant(True, f"All training images but one, {record.text('n_fixed')} of them, with their labels."),
        Grant(True, f"Of the released model {seen}, its architecture, and the optimizer that trained it."),
        shadows,
        Grant(not fresh, f"The initial weights that training began from{which}."),
        Grant(False, "The missing image and its label. They were used only after the attack, to score it."),
    ]
    if record.number("n_shadow_before") is not None:
        old, others = record.text("n_fixed_before"), record.text("n_shadow_before")
        how = f"shadow models of {others} other images, to which the attack was fitted first"
        found.append(Grant(True, f"Another training set, {old} images with their labels, and its {how}."))
    if record.text("hidden"):
        found.append(Grant(False, record.text("hidden")))
    if record.text("released_steps"):
        found.append(Grant(True, f"The same after several steps of training: {record.text('released_steps')}."))
    found += batch_grants(record)
    return found + noise_grants(record)


def noise_grants(record: RunRecord) -> list[Grant]:
    """That the adversary did not know the noise of a private training; empty for others."""
    epsilon = record.number("epsilon")
    if epsilon is None:
        return []
    return [Grant(False, f"The noise of the released model's training, with an epsilon of {short(epsilon, 6)}.")]


def batch_grants(record: RunRecord) -> list[Grant]:
    """Whether the adversary knew the order of mini-batches; empty for full batches."""
    batch = find_setting(record.settings, "descent.batch_size")
    if batch is None:
        return []
    shared = find_setting(record.settings, "descent.order") == "known"
    own = "" if shared else ": every model, released or the adversary's, draws its own"
    return [Grant(shared, f"Which images each mini-batch of {batch} held{own}.")]
