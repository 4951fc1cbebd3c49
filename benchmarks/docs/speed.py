"""Tables of time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import markdown, oldest_first, table


def _rows(records: Sequence[Content]) -> Iterator[tuple[Content, Mapping[str, Any]]]:
    """All rows and the records they are of, the oldest first."""
    for record in oldest_first(records):
        yield from ((record, row) for row in record["rows"])


def _times(spread: Mapping[str, float], spec: str = ".1f") -> str:
    return f"{shown(spread['median'], spec)} ({shown(spread['min'], spec)} to {shown(spread['max'], spec)})"


@table("iteration", "iteration")
def iteration(record: Content) -> str:
    ways = list(dict.fromkeys(way for row in record["rows"] for way in row["ratio"]))
    rows = [
        [row["batch_norm"], str(row["batch"]), *(_times(row["ratio"][way]) for way in ways)] for row in record["rows"]
    ]
    return markdown(["BatchNorm", "batch", *ways], rows)


@table("gpu_iteration", "all gpu**")
def gpu_iteration(records: Sequence[Content]) -> str:
    """Milliseconds of an iteration by victims and images, the newest of each card: a lease is too short for all.

    The first record recorded anew at every call where it timed two forms of single victims in turn; recordings that are
    slower than what they replace are left out.
    """
    titles = {
        "forward_backward": "forward and backward",
        "loop": "victims in turn",
        "recorded_loop": "the same, recorded",
        "vmap": "victims at once",
        "recorded_vmap": "the same, recorded",
    }
    found: dict[tuple[str, int, int, str], tuple[str, dict[str, float]]] = {}
    for record, row in _rows(records):
        times = row.get("seconds")
        if isinstance(times, Mapping) and "parametrization" not in row:
            own = {name: 1000 * value["median"] for name, value in times.items()}
            if "eager" in own:
                own["loop"] = own["eager"]
                if own.get("recorded", own["eager"]) < own["eager"]:
                    own["recorded_loop"] = own["recorded"]
            key = row.get("batch_norm", "eval"), row.get("victims", 1), row["batch"], record["device"]
            found[key] = str(record["created"])[:10], own
    rows = [
        [mode, str(victims), str(images), *(shown(own[way], ".0f") if way in own else "" for way in titles), day, card]
        for (mode, victims, images, card), (day, own) in sorted(found.items())
    ]
    return markdown(["BatchNorm", "victims", "images of each", *titles.values(), "day", "card"], rows)


@table("gpu_agreement", "all gpu**")
def gpu_agreement(records: Sequence[Content]) -> str:
    """Relative distances from float64 by subject and form, the newest of each card."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for record, row in _rows(records):
        if "from_float64" not in row:
            continue
        form = "CPU" if row["device"] == "cpu" else f"GPU, {row['form']}{', TF32' if 'arithmetic' in row else ''}"
        parts = row["from_float64"]
        names = ("update", "matching", "images", "derivative")
        values = [shown(parts[name], ".0e") if name in parts else "" for name in names]
        found[row["subject"], form, record["device"]] = values
    rows = [[subject, form, *values] for (subject, form, _), values in found.items()]
    return markdown(["", "", "update", "loss", "images", "derivative"], rows)


@table("trainer", "trainer")
def trainer(record: Content) -> str:
    [row] = record["rows"]
    titles = {"between_iterations": "between two iterations", "whole_iterations": "whole iterations"}
    return markdown(["", "share of an iteration"], [[title, _times(row[key], ".2%")] for key, title in titles.items()])


@table("completion", "completion")
def completion(record: Content) -> str:
    rows = [
        [
            str(row["rank"]),
            f"{row['observed']:.0%}",
            _times(row["ratio"]),
            shown(row["seconds"]["completion"]["median"], ".1f"),
            shown(row.get("outside")),
        ]
        for row in record["rows"]
    ]
    return markdown(["rank", "observed", "completion over SVD", "seconds", "share of the matrix outside"], rows)


@table("features_speed", "features")
def features_speed(record: Content) -> str:
    rows = [
        [
            row["activation"],
            str(row["batch"]),
            f"`{method}`",
            shown(row["seconds"][method]["median"], ".2f"),
            shown(row["span_error"][method]),
        ]
        for row in record["rows"]
        for method in row["span_error"]
    ]
    return markdown(["activation", "batch", "recovery", "seconds", "part of a true feature outside the span"], rows)


@table("shadows", "shadows")
def shadows(record: Content) -> str:
    rows = [
        [
            row["images"],
            f"{row['known_images']:,}",
            *(shown(1 / row["ratio"]["batched_mlp"][key], ".1f") for key in keys),
        ]
        for keys in [("median", "max", "min")]
        for row in record["rows"]
        if "batched_mlp" in row.get("ratio", {})
    ]
    return markdown(["images", "known images", "times as fast, median", "least", "most"], rows)


@table("linear_shadows", "linear_shadows")
def linear_shadows(record: Content) -> str:
    """Speed of shadow models by linear response, and the attack that learns from either kind."""
    speed = next(row for row in record["rows"] if "models_per_second" in row)
    [memory] = [row["memory"] for row in record["rows"] if "memory" in row]
    attack = next(row for row in record["rows"] if "mse_linear" in row)
    return markdown(
        ["", "exact training", "linear response"],
        [
            ["models a second", *(shown(speed["models_per_second"][way], ".3g") for way in ("exact", "linear"))],
            ["seconds once, for path and Hessians", "", shown(speed["seconds_once"]["median"], ".0f")],
            ["MiB at most", "", shown(max(row["peak_mib"] for row in memory), ".0f")],
            ["relative error of a difference, median", "", shown(attack["error"]["median"], ".2f")],
            [
                f"MSE of the attack after {attack['shadow_models']} models",
                *(shown(attack[f"mse_{way}"], ".4f") for way in ("exact", "linear")),
            ],
            ["MSE of the mean image", *[shown(attack["mse_mean_image"], ".4f")] * 2],
        ],
    )


@table("sampled_shadows", "sampled_shadows")
def sampled_shadows(record: Content) -> str:
    """Errors and speed of shadow models that are not trained."""
    rows = [
        [
            f"{row['known_images']:,}",
            f"linear response, rank {row['rank']}" if "rank" in row else f"{row['images']:,} images per step",
            *(shown(row["error"][key], ".2f") for key in ("median", "max")),
            shown(row["seconds_exact"]["median"], ".0f"),
            shown(row["seconds"], ".3f" if row["seconds"] < 0.1 else ".1f"),
            shown(1 / row["seconds"], ".3g"),
            shown(row["seconds_once"], ".0f") if "seconds_once" in row else "",
            shown(row["times_as_fast"], ".1f" if row["times_as_fast"] < 100 else ",.0f"),
        ]
        for row in record["rows"]
    ]
    heads = ["known images", "from", "relative error, median", "largest", "seconds of exact training"]
    return markdown([*heads, "seconds instead", "models a second", "seconds once", "times as fast"], rows)
