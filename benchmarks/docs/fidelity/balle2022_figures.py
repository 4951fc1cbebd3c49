"""Figures and theorems of Balle et al. 2022."""

from __future__ import annotations

from benchmarks.docs.fidelity.balle2022 import TABLES, curve, figure, picture
from benchmarks.docs.fidelity.factors import Factor, Private
from benchmarks.docs.fidelity.items import Found, Item, newest
from benchmarks.docs.figures import Figures
from benchmarks.docs.released import below_bound

_METRICS = "LPIPS needs weights and KL a classifier: neither is in a record"
_MNIST, _CIFAR10, _DIGITS = "factors_mnist", "factors_cifar10", "factors_digits"
_FIGURES = (
    picture("1", "reconstructions of CIFAR-10"),
    Item("figure 2", "the attack, a drawing", "no numbers", is_result=False),
    Item(
        "figure 3",
        "MNIST and CIFAR-10: MSE of targets to all other images, first percentile (the nearest is in table II)",
        "CIFAR-10 about 0.05",
        "MNIST {mean mnist_retraining_*: metrics.oracle_mse_percentile_1 .4f}, "
        "CIFAR-10 {mean cifar10_retraining_*: metrics.oracle_mse_percentile_1 .4f}",
        "600 targets of MNIST, 80 of CIFAR-10; pages of runs have the histogram",
        "`configs/reconn/mnist_retraining.yaml` and `configs/reconn/cifar10_retraining.yaml`",
    ),
    picture(
        "4",
        "targets, reconstructions and nearest neighbors",
        "a picture of CIFAR-10; [balle2022.md](balle2022.md) has one of MNIST",
    ),
    picture("5a", "MNIST: LPIPS against MSE of single targets", _METRICS),
    picture("5b", "MNIST: KL against MSE of single targets", _METRICS),
    curve("5c", "MNIST: MSE by number of shadow models", "a plot; below the oracle from 8,000 on"),
    figure("5c", "MNIST: the same, and with the paper's network", Factor(_MNIST, "shadows", None, None)),
    figure("5c", "the same on digits", Factor(_DIGITS, "shadows", None, None), "no such experiment"),
    figure("5d", "MNIST: KL by number of shadow models", Factor(_MNIST, "shadows", None, None, ("kl",))),
    figure(
        "6",
        "CIFAR-10: MSE by number of shadow models, of CIFAR-10 or CIFAR-100",
        Factor(_CIFAR10, "shadows", None, None),
        "a plot; a negligible difference",
    ),
    figure("7", "MNIST: MSE by batch size, order known or not", Factor(_MNIST, "batches", None, None)),
    figure("7", "the same on digits", Factor(_DIGITS, "batches", None, None), "no such experiment"),
    picture("8", "embeddings of released models", "`order` of `configs/reconn/factors_mnist.yaml`; a plot of its page"),
    Item(
        "figure 9",
        "MNIST: MSE and accuracy by epsilon",
        "a plot; a large epsilon prevents reconstruction",
        Private("rero_mnist"),
        "500 known images instead of 10,000, 1,000 shadow models instead of 59,000, kernel ridge regression",
        "`configs/reconn/rero_mnist.yaml`, some ten minutes on one core",
    ),
    Item(
        "figure 9",
        "the same on digits",
        "no such experiment",
        Private("rero_digits"),
        "8x8 digits, 300 known images, 800 shadow models, 200 targets, kernel ridge regression",
        "`configs/reconn/rero_digits.yaml`",
        other_data=True,
    ),
    picture("10", "MNIST: reconstructions behind DP"),
    Item(
        "figure 11",
        "MNIST: losses of an image with and without it: AUC of comparing them, initial weights known and unknown",
        "a plot; apart, and nearly the same",
        "{membership_mnist: metrics.known.calibrated_loss.auc .2f} and "
        "{membership_mnist: metrics.fresh.calibrated_loss.auc .2f}",
        "500 known images; models without the image have another one in its place; calibrated losses",
        "`configs/reconn/membership_mnist.yaml`, minutes on one core",
    ),
    Item(
        "figure 11",
        "the same on digits",
        "no such experiment",
        "{membership_digits: metrics.known.calibrated_loss.auc .2f} and "
        "{membership_digits: metrics.fresh.calibrated_loss.auc .2f}",
        "8x8 digits, 300 known images, 200 games for each; calibrated losses",
        "`configs/reconn/membership_digits.yaml`",
        other_data=True,
    ),
    figure("12", "MNIST: MSE by shadow models of another fixed set", Factor(_MNIST, "transfer", None, None)),
    figure("12", "CIFAR-10: the same", Factor(_CIFAR10, "transfer", None, None)),
    figure("12", "the same on digits", Factor(_DIGITS, "transfer", None, None), "no such experiment"),
    figure("13", "MNIST: mean MSE from initial weights and near convergence", Factor(_MNIST, "start")),
    figure("13", "the same on digits", Factor(_DIGITS, "start"), "no such experiment"),
    picture("14", "CIFAR-10: easiest and hardest targets"),
    figure("15", "CIFAR-10: MSE and accuracy by epsilon", Factor(_CIFAR10, "privacy", None, "", ("mse", "accuracy"))),
    figure("17", "MNIST: MSE over ten initial weights", Factor(_MNIST, "seed")),
    Item(
        "figure 17",
        "MNIST: smallest and largest MSE over draws of images and initial weights together",
        "a plot over initial weights",
        "{min mnist_retraining_*: metrics.mse error} to {max mnist_retraining_*: metrics.mse error}",
        "three draws of 200 targets, our repeated training, 500 known images",
        "`configs/reconn/mnist_retraining.yaml`",
    ),
    figure("17", "on digits, five initial weights", Factor(_DIGITS, "seed"), "no such experiment"),
    figure("18", "MNIST: by fixed set size", Factor(_MNIST, "fixed", None, "", ("mse", "lpips", "kl"))),
    picture("19", "CIFAR-10: LPIPS and KL against MSE of single targets", _METRICS),
    figure("20", "CIFAR-10: MSE by epochs", Factor(_CIFAR10, "epochs"), "a plot; a jump at 240 to 250 epochs"),
    picture(
        "21",
        "MNIST: MSE against gradient norm",
        "`activation` of `configs/reconn/factors_mnist.yaml`; a plot of its page",
    ),
    picture(
        "22",
        "CIFAR-10: share of zero gradients under ReLU",
        "`activation` of `configs/reconn/factors_cifar10.yaml`; a plot of its page",
    ),
    figure(
        "23",
        "MNIST: MSE, LPIPS and KL by batch size, order and rate",
        Factor(_MNIST, "batches", None, None, ("mse", "lpips", "kl")),
    ),
    picture("24", "more reconstructions of CIFAR-10"),
)


def _below_bound(figures: Figures) -> Found | None:
    record = newest(figures, "rero_digits")
    return None if record is None else Found(below_bound(record), [record])


_THEOREMS = (
    Item(
        "theorem 1 (no table)",
        "logistic regression: largest pixel error of a reconstructed record",
        "exact",
        "{glm_mnist_logistic: metrics.max_error_worst .0e}",
        "MNIST, 50 records, solved to a tolerance of 1e-12",
        "`configs/reconn/glm_mnist_logistic.yaml`",
    ),
    Item(
        "theorem 8 (no table)",
        "linear regression without intercept, median and largest pixel error",
        "exact up to two roots",
        "{glm_digits_linear: metrics.no_intercept.max_error_median .0e} and "
        "{glm_digits_linear: metrics.no_intercept.max_error_worst .0e}; "
        "{glm_digits_linear: metrics.no_intercept.refused d} of {glm_digits_linear: metrics.n d} records refused",
        "8x8 digits, records one by one",
        "`configs/reconn/glm_digits_linear.yaml`",
    ),
    Item(
        "theorem 2 (no table)",
        "attacks behind DP stay below the bound on their success",
        "a theorem",
        _below_bound,
        "8x8 digits, 200 targets, five privacy budgets",
        "`configs/reconn/rero_digits.yaml`",
    ),
)
ITEMS = (*TABLES, *_FIGURES, *_THEOREMS)
