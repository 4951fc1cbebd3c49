"""Tables of attacks on released models."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import configuration, factor_rows, markdown, metrics_of, row_of, select, table
from lit_recon.metrics.aggregate import interval_of_mean

_NEAREST = {
    "nearest of all other images": "oracle_mse",
    "nearest that the adversary holds": "baseline_nearest_public_mse",
}
_BASELINES = {**_NEAREST, "mean image": "baseline_mean_image_mse"}


def _mse(value: float | None) -> str:
    """A mean squared error with four decimals, unless it is too small for them."""
    return shown(value, ".4f" if value is None or value >= 1e-3 else "error")


def _retraining(records: Sequence[Content]) -> str:
    """Draws of one setting and, where there are several, all of their images together."""
    draws = [metrics_of(record) for record in records]
    images = sum(draw["n"] for draw in draws)
    certified = [round(draw["certified_rate"] * draw["n"]) for draw in draws]
    rows = [
        [
            str(n),
            f"{sure} of {draw['n']}",
            *(_mse(draw[key]) for key in ("certified_mse", "certified_mse_max", "mse", *_BASELINES.values())),
            shown(row_of(record)["cpu_seconds"], ".0f"),
        ]
        for n, (draw, sure, record) in enumerate(zip(draws, certified, records, strict=True))
    ]
    if len(draws) > 1:
        shares = [sum(draw[key] * draw["n"] for draw in draws) / images for key in ("mse", *_BASELINES.values())]
        found = [(draw["certified_mse"] or 0.0) * sure for draw, sure in zip(draws, certified, strict=True)]
        worst = max((draw["certified_mse_max"] or 0.0 for draw in draws), default=None)
        pooled = [sum(found) / max(1, sum(certified)), worst, *shares]
        rows.append(["all", f"{sum(certified)} of {images}", *map(_mse, pooled)])
    header = ["draw", "certified", "their MSE", "largest", "MSE of all", *_BASELINES, "seconds of CPU"]
    return markdown(header, rows)


table("mnist_retraining", "mnist_retraining_*")(_retraining)
table("cifar10_retraining", "cifar10_retraining_*")(_retraining)


_NEWTON = {
    "cifar10_newton": "the paper's setting",
    "cifar10_newton_guess": "the first guess, without a training",
    "cifar10_newton_50000": "50,000 known images",
    "cifar10_newton_10000": "10,000 known images",
    "cifar10_newton_2000": "2,000 known images",
    "cifar10_newton_500": "500 known images",
    "cifar10_newton_500_retraining": "500 known images, by `Retraining` from the first guess",
    "cifar10_newton_100": "100 known images",
    "cifar10_newton_100_retraining": "100 known images, by `Retraining` from the first guess",
    "cifar10_newton_seed_1": "other images and initial weights",
    "cifar10_newton_250_steps": "250 epochs instead of 100",
    "cifar10_newton_relu": "ReLU instead of ELU",
}


@table("cifar10_newton", "cifar10_newton**")
def cifar10_newton(records: Sequence[Content]) -> str:
    """The setting itself and what differs from it, one row each."""
    by_name, lines = {record["name"]: record for record in records}, []
    for name, title in _NEWTON.items():
        if name not in by_name:
            continue
        found, row = metrics_of(by_name[name]), row_of(by_name[name])
        sure = found.get("certified_rate")
        certified = "" if sure is None else f"{round(sure * found['n'])} of {found['n']}"
        worst = "" if sure is None else _mse(found.get("certified_mse_max"))
        errors = [worst, *(_mse(found[key]) for key in ("mse", *_BASELINES.values()))]
        labels = f"{round(found['label_accuracy'] * found['n'])} of {found['n']}"
        on_gpu = "peak_gpu_memory_mib" in found
        minutes = row["seconds" if on_gpu else "cpu_seconds"] / 60
        lines.append([title, certified, *errors, labels, f"{minutes:.0f}{', GPU' if on_gpu else ''}"])
    return markdown(["", "certified", "largest MSE of these", "MSE", *_BASELINES, "labels", "minutes"], lines)


_SCHEMES = {"anderson": "repeated training", "newton": "Newton's method"}


@table(
    "schemes",
    "scheme_anderson_mnist_elu",
    "scheme_newton_mnist_elu",
    "scheme_anderson_mnist_relu",
    "scheme_newton_mnist_relu",
)
def schemes(*records: Content) -> str:
    """Both ways to match the released weights, on the same images."""
    rows = []
    for record in records:
        _, scheme, _, activation = record["name"].split("_")
        found = metrics_of(record)
        sure, seconds = round(found["certified_rate"] * found["n"]), row_of(record)["cpu_seconds"]
        errors = [_mse(found[key]) for key in ("certified_mse_max", "mse", *_BASELINES.values())]
        rows.append([activation, _SCHEMES[scheme], f"{sure} of {found['n']}", *errors, shown(seconds, ".0f")])
    header = ["activation", "", "certified", "largest MSE of these", "MSE", *_BASELINES, "seconds of CPU"]
    return markdown(header, rows)


@table("kinks_cnn", "kinks_cnn")
@table("kinks", "kinks")
def kinks(record: Content) -> str:
    """Cosines of a change with its derivative, by share of the way, and with the change in a smooth network."""
    lines, smooth = [], {}
    for row in record["rows"]:
        if "sharpness" in row:
            smooth[row["known"], row["sharpness"]] = shown(row["cosines"]["median"], ".2f")
            continue
        by_share = {f"{100 * float(share):g} %": cosine for share, cosine in row["cosines"].items()}
        longest = shown(max(length["max"] for length in row["lengths"].values()), ".1f")
        cosines = [shown(cosine["median"], ".2f") for cosine in by_share.values()]
        lines.append([f"{row['known']:,}", row["activation"], *cosines, longest])
    header = ["known images", "activation", *by_share, "longest"]
    if smooth:
        sharpest = max(sharpness for _, sharpness in smooth)
        for line in lines:
            line.append(smooth[int(line[0].replace(",", "")), sharpest] if line[1] == "relu" else "")
        header.append("with a smooth network")
    return markdown(header, lines)


@table("linearity", "linearity")
def linearity(record: Content) -> str:
    """Errors of differences by a share of the own image's gradient, scaled up, with their cosines in brackets."""
    lines = []
    for row in record["rows"]:
        pairs = zip(row["errors"].values(), row["cosines"].values(), strict=True)
        cells = [f"{shown(error['median'], '.2f')} ({shown(cosine['median'], '.2f')})" for error, cosine in pairs]
        lines.append([f"{row['known_images']:,}", row["optimizer"], *cells])
    shares = [f"{100 * float(share):g} %" for share in record["rows"][0]["errors"]]
    return markdown(["known images", "optimizer", *shares], lines)


@table("digits_demo", "digits_demo")
def digits_demo(record: Content) -> str:
    return _retraining([record])


def _errors(record: Content) -> dict[str, str]:
    """Errors by number of shadow models, and those of plain guesses."""
    found = metrics_of(record)
    curve = {int(key.split("_")[2]): value for key, value in found.items() if key.startswith("mse_at_")}
    curve[found["n_shadow"]] = found["mse"]
    rows = {f"{n:,} shadow models": _mse(value) for n, value in sorted(curve.items())}
    return rows | {title: _mse(found[key]) for title, key in _BASELINES.items()}


def _curve(record: Content) -> str:
    return markdown(["", "MSE"], _errors(record).items())


table("mnist_small", "mnist_small")(_curve)


def _cost(record: Content) -> str:
    """The error and the time of linear response."""
    found, row = metrics_of(record), row_of(record)
    error = f"{shown(found['linear_error'], '.2f')} in the median and {shown(found['linear_error_max'], '.2f')} at most"
    shadows = found["shadow_seconds"]
    spent = "the attack took " if shadows is None else f"all shadow models took {shadows:.0f} seconds, the attack "
    if "peak_gpu_memory_mib" in found:
        spent += f"{row['seconds']:.0f} seconds in all, on a GPU"
    elif found.get("seconds", 0) > row["seconds"]:  # the command is the last of several processes
        spent = f"the attack took {found['seconds'] / 60:.0f} minutes by the clock in all, in parts"
    else:
        spent += f"{row['cpu_seconds']:.0f} seconds of CPU in all, {row['seconds'] / 60:.0f} minutes by the clock"
    return f"Relative error of {found['linear_error_n']} shadow models: {error}; {spent}."


@table("mnist_linear", "mnist_linear")
def _linear(record: Content) -> str:
    return f"{_curve(record)}\n\n{_cost(record)}"


@table("cifar10_linear", "cifar10_linear**")
def cifar10_linear(records: Sequence[Content]) -> str:
    """Numbers of targets beside each other, with the interval of the mean over targets."""
    ordered = sorted(records, key=lambda record: int(metrics_of(record)["n"]))
    columns, headings, notes = [_errors(record) for record in ordered], [], []
    for record in ordered:
        found = metrics_of(record)
        headings.append(f"{found['n']} targets{', on a GPU' if 'peak_gpu_memory_mib' in found else ''}")
        deviations = (found["n"] - 1) * found["mse_std"] ** 2
        bounds = interval_of_mean(found["n"], found["n_batches"], found["mse"], deviations)
        interval = " to ".join(shown(bound, ".4f") for bound in bounds or ())
        what = f"95 % interval of the MSE with {found['n_shadow']:,} shadow models"
        notes.append(f"{headings[-1]}: {what} {interval}. {_cost(record)}")
    titles = dict.fromkeys(title for column in columns for title in column)
    rows = [[title, *(column.get(title, "–") for column in columns)] for title in titles]
    return "\n\n".join([markdown(["MSE", *headings], rows), *notes])


@table("rero_mnist", "rero_mnist")
@table("rero_digits", "rero_digits")
def robustness(record: Content) -> str:
    """Error and identification of one among candidates by budget, with the tight bound in brackets."""
    found, rows = metrics_of(record), row_of(record)["tables"]["rero"]
    candidates = sorted({row["candidates"] for row in rows if "candidates" in row})
    titles = {"plain": "none, no clipping", "unknown_initialization": "the same, initial weights unknown"}
    titles["clipped"] = "clipped, no noise"
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        same = select(rows, cell=cell)
        first, chances = same[0], []
        for count in candidates:
            [row] = select(same, candidates=count)
            bound = f" ({shown(row['tight'], '.3f')})" if "tight" in row else ""
            chances.append(shown(row["success_rate"], ".3f") + bound if "success_rate" in row else "")
        epsilon = titles.get(cell) or f"{first['epsilon']:,.0f}"
        noise = shown(first["noise_multiplier"], ".4g") if "noise_multiplier" in first else ""
        lines.append([epsilon, noise, _mse(first["mse"]), shown(first["accuracy"], ".1%"), *chances])
    header = ["epsilon", "noise multiplier", "MSE", "accuracy", *(f"identifies 1 of {n}" for n in candidates)]
    mean, nearest = _mse(found["baseline_mean_image_mse"]), _mse(found["oracle_mse"])
    below = f"{below_bound(record)} are below it"
    note = f"The mean image has an MSE of {mean}, the nearest other image {nearest}; {below}."
    return f"{markdown(header, lines)}\n\n{note}"


def below_bound(record: Content) -> str:
    """How many success rates lie below their bound, of those whose bound is below 1: no rate exceeds a bound of 1."""
    rows = [row for row in row_of(record)["tables"]["rero"] if "below" in row and row["tight"] < 1]
    compared = [row["below"] == "True" for row in rows]
    return f"{sum(compared)} of {len(compared)} success rates with a bound below 1"


def _glm(record: Content) -> list[list[str]]:
    """One row for each model of a run of `reconn.py glm`."""
    found, settings = metrics_of(record), configuration(f"reconn/{record['name']}.yaml")
    rows = []
    for name in ("", *settings.get("beside", {})):
        chosen = settings["beside"][name] if name else settings["regression"]
        options = ", ".join(f"{key}={value}" for key, value in chosen.get("init_args", {}).items())
        start = f"{name}." if name else ""
        errors = ("max_error_median", "max_error_worst", "error_estimate_median")
        values = [found.get(f"{start}{key}") for key in errors]
        median, worst, estimate = (shown(value, ".2g" if (value or 0) > 1e-3 else ".1e") for value in values)
        exact = shown(found[f"{start}exact_share"], ".0%")
        refused = f"{found[f'{start}refused']} of {found['n']}"
        rows.append(
            [f"`{record['name']}`", f"`{chosen['class_path']}({options})`", median, worst, exact, estimate, refused]
        )
    return rows


def _closed_forms(*records: Content) -> str:
    header = ["run", "model", "median", "worst", "exact", "estimate, median", "refused"]
    return markdown(header, [row for record in records for row in _glm(record)])


table("glm_digits", "glm_digits_linear", "glm_digits_poisson", "glm_digits_interpolated")(_closed_forms)
table("glm_mnist", "glm_mnist_logistic", "glm_mnist_odd")(_closed_forms)


@table("membership_mnist", "membership_mnist")
@table("membership_digits", "membership_digits")
def membership(record: Content) -> str:
    found = metrics_of(record)
    attacks = {
        "train_both": "train on both",
        "loss": "compare losses",
        "calibrated_loss": "compare calibrated losses",
        "reconstruction": "reconstruct",
    }

    def interval(key: str) -> str:
        low, high = (shown(found[f"{key}_{end}"], ".2f") for end in ("low", "high"))
        return f"{shown(found[key], '.2f')} ({low} to {high})"

    rows = [
        [title, *(interval(f"{weights}.{name}.{m}") for weights in ("known", "fresh") for m in ("advantage", "auc"))]
        for name, title in attacks.items()
    ]
    header = ["attack", "advantage, known", "AUC, known", "advantage, unknown", "AUC, unknown"]
    implied = shown(found["known.reconstruction.implied_share"], ".0%")
    note = (
        f"{found['n']} games, 95 % intervals. With known initial weights {implied} of the reconstructions were close "
        "enough that the guess had to be correct."
    )
    return f"{markdown(header, rows)}\n\n{note}"


@table("factors_digits", "all factors_digits**")
def factors_digits(records: Sequence[Content]) -> str:
    """MSE by factor and value, with the accuracy of the released models in brackets."""
    return _factors(records, "factors_digits")


@table("factors_mnist", "all factors_mnist**")
def factors_mnist(records: Sequence[Content]) -> str:
    """The same on MNIST, of the factors that were run."""
    return _factors(records, "factors_mnist")


@table("two_cores_factors_cifar10", "all two_cores_factors_cifar10**")
@table("linear_factors_cifar10", "all linear_factors_cifar10**")
def linear_factors_cifar10(records: Sequence[Content]) -> str:
    """The same on CIFAR-10, with predicted shadow models."""
    return _factors(records, "linear_factors_cifar10")


@table("released_training", "released_training")
def released_training(record: Content) -> str:
    """Accuracies of released models and the AUC of a guess of membership, by known images, optimizer and epochs."""
    rows = [
        [
            f"{row['known_images']:,}",
            row["optimizer"],
            f"{model['epochs']:,}",
            *(shown(model[key], ".1%") for key in ("train_accuracy", "accuracy")),
            shown(model["membership_auc"], ".2f"),
        ]
        for row in record["rows"]
        for model in row["models"]
    ]
    return markdown(["known images", "optimizer", "epochs", "accuracy on them", "on others", "AUC"], rows)


def _factors(records: Sequence[Content], name: str) -> str:
    settings = configuration(f"reconn/{name}.yaml")["factors"]
    base, *others = (row for row, _ in factor_rows(records))
    run = [row for row in others if row.get("mse") is not None]
    lines = []
    for factor, line in dict.fromkeys((row["factor"], row.get("line", "")) for row in run):
        same = [row for row in run if (row["factor"], row.get("line", "")) == (factor, line)]
        if all(row["mse"] == base["mse"] for row in same):
            continue  # the factor's own values were not run
        cells = ", ".join(f"{row['value']}: {_mse(row['mse'])} ({shown(row['accuracy'], '.0%')})" for row in same)
        lines.append([settings[factor]["title"] + (f", {line}" if line else ""), cells])
    note = (
        f"The base has an MSE of {_mse(base['mse'])}, the nearest other image {_mse(base['oracle_mse'])}, the mean "
        f"image {_mse(base['baseline_mean_image_mse'])}."
    )
    errors = [row["mse"] for row in run if row["factor"] == "seed"]
    if len(errors) > 1:
        note += (
            f" Over initial weights of {len(errors)} seeds the mean is {_mse(fmean(errors))}, the range "
            f"{_mse(min(errors))} to {_mse(max(errors))}."
        )
    if len(run) < len(others):
        note += f" Of {len(others)} values of factors {len(run)} have results; the others were not run yet."
    return f"{markdown(['factor', 'MSE, and accuracy of the released models'], lines)}\n\n{note}"
