"""Tables of attacks on a client's update."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import markdown, metrics_of, oldest_first, row_of, select, table

Row = Mapping[str, Any]


def _scores(title: str, record: Content) -> list[str]:
    """Title, images and batches, RMSE, PSNR, SSIM, labels and seconds of one run."""
    found = metrics_of(record)
    size = f"{found['n']} in {found['n_batches']}"
    rmse = f"{shown(found['rmse'])} ± {shown(found['rmse_std'])}"
    rest = [shown(found["psnr"], ".1f"), shown(found["ssim"], ".3f"), shown(found.get("label_accuracy"), ".0%")]
    return [title, size, rmse, *rest, shown(row_of(record)["seconds"], ".0f")]


def _baselines(record: Content) -> list[list[str]]:
    found = metrics_of(record)
    names = {"nearest public image": "baseline_nearest_public", "mean image": "baseline_mean_image"}
    specs = {"rmse": ".3f", "psnr": ".1f", "ssim": ".3f"}
    return [
        [title, "", *(shown(found[f"{name}_{m}"], spec) for m, spec in specs.items())] for title, name in names.items()
    ]


_SCORES = ["", "images in batches", "RMSE", "PSNR, dB", "SSIM", "labels right", "seconds of the command"]


@table("demo_photos", "demo_photos", "demo_photos_matching")
def demo_photos(maps: Content, matching: Content) -> str:
    rows = [_scores("`demo_photos`, exact maps", maps), _scores("`demo_photos_matching`, gradient matching", matching)]
    return markdown(_SCORES, [*rows, *_baselines(maps)])


@table("demo_digits", "demo_digits")
def demo_digits(record: Content) -> str:
    return markdown(_SCORES, [_scores("`demo_digits`, gradient matching", record), *_baselines(record)])


_SMALL = {
    "demo_digits": "attack.py run",
    "digits_small": "attack.py evaluate",
    "two_layer_small": "attack.py bounds",
    "digits_demo": "reconn.py run",
    "glm_digits_linear": "reconn.py glm",
    "membership_digits": "reconn.py membership",
    "rero_digits": "reconn.py rero",
    "factors_digits": "reconn.py run",
}


@table("journeys", *_SMALL)
def journeys(*records: Content) -> str:
    """What the smallest configuration of every command takes."""
    rows = []
    for record in records:
        name = record["name"]
        seconds = shown(row_of(record)["seconds"], ".0f")
        rows.append([f"`{_SMALL[name]}`", f"`{name}`", seconds])
    return markdown(["command", "configuration", "seconds"], rows)


@table("batch_statistics", "batch_statistics")
def batch_statistics(record: Content) -> str:
    """Means, baselines, and the error of every image."""
    errors = sorted(float(row["rmse"]) for row in row_of(record)["tables"]["victims"])
    each = f"RMSE of every image: {', '.join(map(shown, errors))}."
    return f"{markdown(_SCORES, [_scores('`batch_statistics`', record), *_baselines(record)])}\n\n{each}"


def _angles(row: Row) -> str:
    angles = [abs(float(angle)) for angle in row["worst_one_minus_cosine"]]
    return shown(max(angles), ".0e") if angles else "–"


def _recovered(row: Row) -> list[str]:
    layers = ", ".join(f"`{name.removeprefix('trunk.')}`" for name in row["layers"])
    counts = [f"{row['recovered']} of {row['draws']}", str(row["certified_and_wrong"])]
    return [*counts, _angles(row), layers, shown(row["seconds"]["median"], ".1f")]


_RECOVERED = ["recovered", "of them wrong", "worst 1 - cos", "input of", "seconds, median"]


@table("maps", "maps")
def maps(record: Content) -> str:
    rows = select(record["rows"], defense="none")
    return markdown(
        ["batch", "BatchNorm", *_RECOVERED], [[str(r["batch"]), r["batch_norm"], *_recovered(r)] for r in rows]
    )


@table("maps_defended", "maps")
def maps_defended(record: Content) -> str:
    rows = [row for row in record["rows"] if row["defense"] != "none"]
    return markdown(
        ["defense", "batch", *_RECOVERED], [[f"`{r['defense']}`", str(r["batch"]), *_recovered(r)] for r in rows]
    )


@table("smooth", "all smooth**")
def smooth(records: list[Content]) -> str:
    """Errors behind smooth activations, beside those of gradient matching for as long."""
    newest = {}
    for row in (row for record in records for row in record["rows"]):
        # records from before networks were trained in other ways do not say how
        newest[row["activation"], row.get("trained", "8 steps"), row["batch"]] = row
    rows = []
    for (activation, trained, batch), row in sorted(newest.items()):
        errors, theirs = row["rmse"], row["rmse_geiping2020"]
        rows.append(
            [
                activation.upper(),
                trained,
                str(batch),
                str(row["images"]),
                shown(statistics.median(errors)),
                shown(max(errors)),
                certified(row),
                shown(statistics.median(theirs)),
                shown(row["seconds"]["median"], ".0f"),
            ]
        )
    header = ["activation", "after", "batch", "images", "median RMSE", "largest RMSE", "certified, of them wrong"]
    return markdown([*header, "median RMSE of `geiping2020` in the same time", "seconds of a batch"], rows)


@table("architectures", "all architectures**")
def architectures(records: list[Content]) -> str:
    """Errors with other networks and sizes, beside those of the nearest other photograph."""
    rows = []
    newest = {(row["network"], row["batch"]): row for record in records for row in record["rows"]}
    for (network, batch), row in sorted(newest.items()):
        errors, nearest = row["rmse"], row["nearest_other"]
        rows.append(
            [
                network,
                str(batch),
                f"{len(errors)} of {row['images']}",
                shown(statistics.median(errors) if errors else None),
                shown(max(errors, default=None)),
                certified(row),
                shown(statistics.median(nearest) if nearest else None),
                "" if row.get("entries") is None else shown(row["entries"], ".2f"),
                shown(row["seconds"]["median"], ".0f" if row["seconds"]["median"] >= 1 else ".1f"),
            ]
        )
    header = ["network", "batch", "attacked", "median RMSE", "largest RMSE", "certified, of them wrong"]
    return markdown([*header, "nearest other photograph", "entries per pixel", "seconds of a batch"], rows)


_ACTIVATIONS = {"gelu": "GELU", "relu": "ReLU"}


def certified(found: Row) -> str:
    """Certified images, and how many of them are wrong."""
    return f"{found['certified']}, {found['certified_and_wrong']}"


@table("features", "real-features")
def features(record: Content) -> str:
    """Span error of every method without a defense, by activation and batch."""
    names = ["moments", "moments_control_variates", "feature_ica", "neuron_ica", "null_vectors"]
    plain = select(record["rows"], defense="none", centered=True, trained=0, labels="drawn")
    rows = []
    for activation, batch in sorted({(row["activation"], row["batch"]) for row in plain}):
        same = select(plain, activation=activation, batch=batch)
        same = sorted(same, key=lambda row: int(row["draws"]))  # the one with most draws comes last, and counts
        methods = {name: (found, row["draws"]) for row in same for name, found in row["methods"].items()}
        exact, draws = methods["exact"]
        rows.append(
            [
                _ACTIVATIONS[activation],
                str(batch),
                *(shown(methods[name][0]["span_error"]["median"]) if name in methods else "" for name in names),
                shown(exact["span_error"]["median"]),
                shown(abs(exact["worst_one_minus_cosine"]["max"])),
                f"{exact['certified']} of {draws}, {exact['certified_and_wrong']}",
                shown(exact["seconds"]["median"], ".1f"),
            ]
        )
    header = ["activation", "batch", "moments", "with control variates", "ICA over features", "ICA over neurons"]
    last = ["null vectors", "exact", "exact: worst 1 - cos", "certified, of them wrong", "seconds, median"]
    return markdown([*header, *last], rows)


@table("feature_sources", "all feature-sources**")
def feature_sources(records: Sequence[Content]) -> str:
    """Cosines of separated features with true ones, by the weights of the separation."""
    titles = {
        "published_ica": "published weights",
        "published_ica_any_sign": "without the penalty on negative features",
        "published_ica_tenfold": "with ten times its weight",
        "random_directions": "random directions",
    }
    return _separated(records, titles)


@table("feature_searches", "all feature-searches**")
def feature_searches(records: Sequence[Content]) -> str:
    """The same by the way in which the published weights are minimized."""
    titles = {
        "published_ica_200_steps": "200 steps",
        "published_ica": "2,000 steps",
        "published_ica_10000_steps": "10,000 steps",
        "published_ica_random_start": "random start",
        "published_ica_centered_whitening": "centered before whitening",
    }
    return _separated(records, titles)


def _separated(records: Sequence[Content], titles: Mapping[str, str]) -> str:
    newest = {(r["n_features"], r["batch"]): r["methods"] for one in oldest_first(records) for r in one["rows"]}
    rows = [[*map(str, k), *(shown(newest[k][name]["cosine"]["median"]) for name in titles)] for k in sorted(newest)]
    return markdown(["features", "batch", *titles.values()], rows)


@table("features_settings", "real-features")
def features_settings(record: Content) -> str:
    titles: dict[str, dict[str, Any]] = {
        "distinct labels": {"labels": "distinct"},
        "one class only": {"labels": "same"},
        "features not centered": {"centered": False},
        "trained neurons beside the random ones": {"trained": 4096},
    }
    rows = []
    for title, entries in titles.items():
        for row in select(record["rows"], batch=8, defense="none", **entries):
            exact = row["methods"]["exact"]
            errors = [shown(exact["span_error"]["median"]), shown(abs(exact["worst_one_minus_cosine"]["max"]))]
            certified = f"{exact['certified']} of {row['draws']}, {exact['certified_and_wrong']}"
            rows.append([title, _ACTIVATIONS[row["activation"]], *errors, certified])
    return markdown(["setting", "activation", "feature error", "worst 1 - cos", "certified, of them wrong"], rows)


@table("features_defended", "real-features")
def features_defended(record: Content) -> str:
    """Span error by defense, method and batch; how many draws were certified in brackets."""
    methods = {"moments": "moments", "moments_control_variates": "control variates", "exact": "exact"}
    chosen = [row for row in record["rows"] if set(methods) <= set(row["methods"])]
    batches = sorted({row["batch"] for row in chosen})
    rows = []
    for defense in dict.fromkeys(row["defense"] for row in chosen):
        for method, title in methods.items():
            cells = []
            for batch in batches:
                [row] = select(chosen, defense=defense, batch=batch)
                found = row["methods"][method]
                sure = f" ({certified(found)})" if method == "exact" else ""
                cells.append(shown(found["span_error"]["median"]) + sure)
            rows.append([f"`{defense}`" if method == "moments" else "", title, *cells])
    return markdown(["defense", "method", *(f"batch {batch}" for batch in batches)], rows)


@table("imprint", "imprint")
def imprint(record: Content) -> str:
    header = ["defense", "images alone", "hits", "hits by batch", "median PSNR of images alone, dB", "RMSE of all"]
    last = ["labels of images alone that are right", "hits, largest differences", "hits, smallest differences"]
    rows = [
        [
            "none" if row["defense"] == "none" else f"`{row['defense'].partition(', relative')[0].rstrip(')')})`",
            *(shown(row[key], ".1f") for key in ("alone", "hits")),
            ", ".join(f"{hits:g}" for hits in row["hits_by_seed"]),
            "> 100" if row["psnr_alone"] > 100 else shown(row["psnr_alone"], ".0f"),
            shown(row["rmse"], ".3f"),
            shown(row["labels_alone"], ".0%"),
            *(shown(row[key], ".1f") for key in ("largest_differences", "smallest_differences")),
        ]
        for row in record["rows"]
    ]
    return markdown([*header, *last], rows)


def _spread(values: Row) -> str:
    middle = shown(values["median"])
    return middle if values["n"] == 1 else f"{middle} ({shown(values['min'])} to {shown(values['max'])})"


@table("cocktail_party", "cocktail_party")
def cocktail_party(record: Content) -> str:
    batches = sorted({row["batch"] for row in record["rows"]})
    rows = []
    for variant in dict.fromkeys(row["variant"] for row in record["rows"]):
        cells = [select(record["rows"], batch=batch, variant=variant) for batch in batches]
        rows.append([variant, *(_spread(found[0][m]) if found else "" for found in cells for m in ("rmse", "ssim"))])
    return markdown(["terms", *(f"{m}, batch {batch}" for batch in batches for m in ("RMSE", "SSIM"))], rows)


@table("certificates", "certificates_*")
def certificates(records: list[Content]) -> str:
    """Certified images by network, BatchNorm mode, labels and batch; totals; why the others were not certified."""
    found = [row for record in records for row in record["rows"]]
    batches = sorted({row["batch"] for row in found})
    kinds = dict.fromkeys((row["network"], row["batch_norm"], row["labels"]) for row in found)
    rows = []
    for network, mode, labels in kinds:
        same = {row["batch"]: row for row in select(found, network=network, batch_norm=mode, labels=labels)}
        counts = [f"{same[n]['certified']} of {same[n]['images']}" if n in same else "" for n in batches]
        rows.append([network, mode, labels, *counts])
    total, certified, wrong = (sum(row[key] for row in found) for key in ("images", "certified", "certified_and_wrong"))
    worst = max((error for row in found for error in row["rmse_of_certified"]), default=None)
    note = (
        f"In all {certified} of {total} images are certified, {wrong} of them wrong; the largest RMSE of a certified "
        f"image is {shown(worst)}."
    )
    reasons: Counter[str] = Counter()
    for row in found:
        reasons.update(row["not_certified"])
    others = "\n".join(f"- {count} images: {reason}" for reason, count in reasons.most_common())
    table_of_counts = markdown(["network", "BatchNorm", "labels", *(f"batch {n}" for n in batches)], rows)
    return f"{table_of_counts}\n\n{note}" + (f" Not certified:\n\n{others}" if others else "")


@table("layer_inputs", "layer_inputs")
def layer_inputs(record: Content) -> str:
    """Inputs found of all, wrong ones, their error, labels, and seconds, by batch and form of the update."""
    rows = []
    for n, release in dict.fromkeys((row["batch"], row["release"]) for row in record["rows"]):
        own = select(record["rows"], batch=n, release=release)
        total, right, wrong = (sum(row.get(key) or 0 for row in own) for key in ("found", "labels_right", "wrong"))
        errors = [row["error"] for row in own if "error" in row]
        error = shown(statistics.median(errors)) if errors else ""
        seconds = shown(statistics.median(row["seconds"] for row in own), ".1f")
        rows.append([str(n), release, f"{total} of {n * len(own)}", str(wrong), error, str(right), seconds])
    return markdown(["batch", "update", "found", "wrong", "error", "labels right", "seconds a batch"], rows)
