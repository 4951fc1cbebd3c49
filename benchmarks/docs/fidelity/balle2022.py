"""Items of Balle, Cherubin, Hayes: Reconstructing Training Data with Informed Adversaries, 2022."""

from __future__ import annotations

from benchmarks.docs.fidelity import factors
from benchmarks.docs.fidelity.factors import WORDS, Factor, Trained
from benchmarks.docs.fidelity.items import Item

_MNIST = (
    "1,000 known images instead of 10,000, 4,000 shadow models instead of 59,000, 200 targets instead of 1,000, unless "
    "named; kernel ridge regression, of all weights or of the image's part of the first layer, instead of a network"
)
_CIFAR10 = (
    "1,000 known images instead of 5,000, 8,000 shadow models instead of 54,000, 200 targets instead of 1,000, unless "
    "named; kernel ridge regression instead of the network"
)
_LINEAR = (
    "6,000 shadow models by linear response instead of 54,000 that are trained, 50 targets; kernel ridge regression on "
    "the image's part of the first linear layer, or on what is released, instead of a network"
)
_TWO_CORES = _LINEAR.replace("6,000", "4,000").replace("50 targets", "12 targets")
_DIGITS = "8x8 digits, 300 known images, 600 shadow models, 80 targets, kernel ridge regression"
_NEEDS = {
    "factors_mnist": "`configs/reconn/factors_mnist.yaml`, hours on two cores",
    "factors_cifar10": "`configs/reconn/factors_cifar10.yaml`, for GPUs",
    "factors_digits": "`configs/reconn/factors_digits.yaml`, minutes on one core",
    "linear_factors_cifar10": "`configs/reconn/linear_factors_cifar10.yaml`, minutes of a GPU",
    "two_cores_factors_cifar10": "`configs/reconn/linear_factors_cifar10.yaml`, hours of a core",
}
_SETTINGS = {
    "factors_mnist": _MNIST,
    "factors_cifar10": _CIFAR10,
    "factors_digits": _DIGITS,
    "linear_factors_cifar10": _LINEAR,
    "two_cores_factors_cifar10": _TWO_CORES,
}
_PAGES = "pictures; pages of runs show them, none is kept here"


def _of(where: str, quantity: str, paper: str, ours: Factor) -> Item:
    """An item of a study of factors."""
    other = ours.record == "factors_digits"
    return Item(where, quantity, paper, ours, _SETTINGS[ours.record], _NEEDS[ours.record], other_data=other)


_RETRAINING = (
    "500 known images instead of 10,000, 600 targets in three draws; the training repeated until the weights agree, "
    "from 1,000 shadow models"
)
_DEFAULTS = (
    Item(
        "table II, MNIST",
        "MSE of the nearest-neighbor oracle",
        "0.0232",
        "{mean mnist_retraining_*: metrics.oracle_mse .4f}",
        "nearest of all other images of the data, 600 targets in three draws",
        "`configs/reconn/mnist_retraining.yaml`",
    ),
    Item(
        "table II, MNIST",
        "MSE, default, the paper's attack",
        "0.0089",
        "{mnist_paper: metrics.mse .4f}",
        "the paper's size",
        "`configs/reconn/mnist_paper.yaml`: hours on a GPU for the network, eight hours on a core for shadow models",
    ),
    Item(
        "table II, MNIST",
        "MSE, default, our kernel ridge on the first layer",
        "0.0089",
        "{mnist_small: metrics.mse .4f}",
        "500 known images instead of 10,000, 8,000 shadow models instead of 59,000, 200 targets",
        "`configs/reconn/mnist_small.yaml`",
    ),
    Item(
        "table II, MNIST",
        "MSE, default, our repeated training",
        "0.0089",
        "{mean mnist_retraining_*: metrics.mse error}, {mean mnist_retraining_*: metrics.certified_rate .1%} certified",
        _RETRAINING,
        "`configs/reconn/mnist_retraining.yaml`",
    ),
    Item(
        "table II, MNIST",
        "MSE, default, 10,000 known images, our kernel ridge, shadow models by linear response",
        "0.0089",
        "{mnist_linear: metrics.mse .4f}",
        "16,000 shadow models instead of 59,000, 200 targets",
        "`configs/reconn/mnist_linear.yaml`, minutes on one core",
    ),
    Item(
        "table II, CIFAR-10",
        "MSE of the nearest-neighbor oracle",
        "0.0291",
        "{mean cifar10_retraining_*: metrics.oracle_mse .4f}",
        "nearest of all other images of the data, 80 targets in two draws",
        "`configs/reconn/cifar10_retraining.yaml`",
    ),
    Item(
        "table II, CIFAR-10",
        "MSE, default, the paper's attack",
        "0.0049",
        "{cifar10_paper: metrics.mse .4f}",
        "the paper's size",
        "`configs/reconn/cifar10_paper.yaml`: weeks on one core, for several GPUs",
    ),
    Item(
        "table II, CIFAR-10",
        "MSE, default, our kernel ridge on the first linear layer, shadow models by linear response",
        "0.0049",
        "{cifar10_linear_200: metrics.mse .4f}",
        "the paper's network, training and 5,000 known images, 16,000 shadow models instead of 54,000, 200 targets",
        "`configs/reconn/cifar10_linear.yaml`, minutes of a GPU",
    ),
    Item(
        "table II, CIFAR-10",
        "MSE, default, our kernel ridge",
        "0.0049",
        "{cifar10_small: metrics.mse .4f}",
        "100 known images instead of 5,000, a hundredth of the shadow models, 50 targets",
        "`configs/reconn/cifar10_small.yaml`",
    ),
    Item(
        "table II, CIFAR-10",
        "MSE, default, Newton's method in image space",
        "0.0049",
        "{cifar10_newton: metrics.mse error}, {cifar10_newton: metrics.certified_rate .1%} certified",
        "the paper's network, training and 5,000 known images, no shadow models, 8 targets",
        "`configs/reconn/cifar10_newton.yaml`",
    ),
    Item(
        "table II, CIFAR-10",
        "MSE, default, our repeated training, of another network",
        "0.0049",
        "{mean cifar10_retraining_*: metrics.mse error}, "
        "{mean cifar10_retraining_*: metrics.certified_rate .1%} certified",
        "a perceptron with ten hidden neurons instead of the convolutional network, 500 known images instead of 5,000, "
        "80 targets in two draws",
        "`configs/reconn/cifar10_retraining.yaml`",
    ),
)
#: Rows of table II: factor; for MNIST and CIFAR-10 what is changed, the printed value, and the place in our studies.
_TABLE_2: dict[str, tuple[tuple[str, str, Factor], tuple[str, str, Factor]]] = {
    "fixed set size": (
        ("1,000 images", "0.0094", Factor("factors_mnist", "fixed", "1,000", on_first_layer="the default")),
        (
            "50,000 images, shadows of CIFAR-100",
            "0.0039",
            Factor("factors_cifar10", "large", "100", "gradient descent"),
        ),
    ),
    "size and architecture": (
        ("100 neurons", "0.0079", Factor("factors_mnist", "size", "100", on_first_layer="100 neurons")),
        ("twice the parameters", "0.0047", Factor("two_cores_factors_cifar10", "size", "101,398")),
    ),
    "released layers": (
        ("second layer, 100 neurons", "0.0124", Factor("factors_mnist", "size", "100, second layer only")),
        ("convolutions", "0.0257", Factor("linear_factors_cifar10", "layers", "convolutions")),
    ),
    "epochs": (
        ("250", "0.0121", Factor("factors_mnist", "epochs", "250", on_first_layer="250 epochs")),
        ("200", "0.0094", Factor("two_cores_factors_cifar10", "epochs", "200")),
    ),
    "activation": (
        ("ReLU", "0.0182", Factor("factors_mnist", "activation", "relu")),
        ("ReLU", "0.0324", Factor("two_cores_factors_cifar10", "activation", "relu")),
    ),
    "learning rate": (
        ("0.01", "0.0049", Factor("factors_mnist", "rate", "0.01", "momentum 0.9", on_first_layer="rate 0.01")),
        ("0.001", "0.0055", Factor("linear_factors_cifar10", "rate", "0.001")),
    ),
    "random initialization": (
        ("unknown", "0.0695", Factor("factors_mnist", "initialization", "unknown")),
        ("unknown", "0.0931", Factor("factors_cifar10", "initialization", "unknown")),
    ),
    "model access": (
        ("logits", "0.0110", Factor("factors_mnist", "access", "logits on 200 images")),
        ("logits", "0.0198", Factor("two_cores_factors_cifar10", "access", "logits on 500 images")),
    ),
}
_TABLE_2_ITEMS = tuple(
    _of(f"table II, {data}", f"MSE, {factor}: {change}", paper, ours)
    for place, data in enumerate(("MNIST", "CIFAR-10"))
    for factor, both in _TABLE_2.items()
    for change, paper, ours in (both[place],)
)
_TABLE_2_DIGITS = (
    Item(
        "table II, on digits",
        "MSE, unknown and known initial weights",
        "no such experiment",
        "{rero_digits: metrics.unknown_initialization.mse .4f} and {rero_digits: metrics.plain.mse .4f}; "
        "mean image {rero_digits: metrics.baseline_mean_image_mse .4f}",
        "8x8 digits, 300 known images, 800 shadow models, 200 targets, kernel ridge regression",
        "`configs/reconn/rero_digits.yaml`",
        other_data=True,
    ),
    *(
        _of(
            "table II, on digits", f"MSE by {words}", "no such experiment", Factor("factors_digits", factor, None, None)
        )
        for factor, words in {
            "fixed": "fixed set size",
            "width": "hidden neurons",
            "epochs": "epochs",
            "activation": "activation",
            "rate": "learning rate",
            "access": "what is released",
        }.items()
    ),
)
_SCORES = ("lpips", "mse", "kl")
#: Table III: line of our study, learning rate, printed LPIPS, MSE and KL, and the label of the factor `first_layer`.
_TABLE_3 = (
    ("no momentum, unknown initial weights", "0.01", "LPIPS 0.3342, MSE 0.0693, KL 5.2477", ""),
    ("momentum 0.9, unknown initial weights", "0.01", "LPIPS 0.3326, MSE 0.0691, KL 5.2218", ""),
    ("no momentum, unknown initial weights", "0.2", "LPIPS 0.3326, MSE 0.0692, KL 5.3599", ""),
    ("momentum 0.9, unknown initial weights", "0.2", "LPIPS 0.3226, MSE 0.0695, KL 5.5261", ""),
    ("no momentum", "0.01", "LPIPS 0.0197, MSE 0.0041, KL 0.0140", "rate 0.01, no momentum"),
    ("momentum 0.9", "0.01", "LPIPS 0.0225, MSE 0.0049, KL 0.0179", "rate 0.01"),
    ("no momentum", "0.2", "LPIPS 0.0286, MSE 0.0063, KL 0.0357", "rate 0.2, no momentum"),
    ("momentum 0.9", "0.2", "LPIPS 0.0382, MSE 0.0089, KL 0.0414", "the default"),
)
_TABLE_3_ITEMS = tuple(
    _of("table III", f"MNIST, rate {rate}, {line}", paper, Factor("factors_mnist", "rate", rate, line, _SCORES, label))
    for line, rate, paper, label in _TABLE_3
)
_TABLE_4_ITEMS = tuple(
    _of(
        "table IV, figure 16",
        f"MNIST, hidden neurons: {width}",
        paper,
        Factor("factors_mnist", "size", width, "", _SCORES, label),
    )
    for width, label, paper in (
        ("1", "1 neuron", "LPIPS 0.0325, MSE 0.0079, KL 0.0448"),
        ("10", "the default", "LPIPS 0.0392, MSE 0.0089, KL 0.0516"),
        ("100", "100 neurons", "LPIPS 0.0338, MSE 0.0079, KL 0.0258"),
        ("100, second layer only", "", "LPIPS 0.0477, MSE 0.0124, KL 0.0840"),
    )
)
#: Table IX by known images and optimizer: epochs, MSE, LPIPS, training and test accuracy, AUC.
_TABLE_9 = {
    ("1,000", "gradient descent"): (
        (100, "0.0041 0.1861 0.451 0.327 0.61"),
        (250, "0.0126 0.3117 0.759 0.324 0.80"),
        (500, "0.0170 0.3594 0.998 0.328 0.89"),
    ),
    ("1,000", "Adam"): (
        (100, "0.0052 0.2042 0.952 0.299 0.87"),
        (250, "0.0065 0.2355 1.000 0.300 0.92"),
        (500, "0.0068 0.2428 1.000 0.303 0.91"),
    ),
    ("5,000", "gradient descent"): (
        (100, "0.0049 0.2070 0.392 0.388 0.51"),
        (250, "0.0201 0.3863 0.461 0.401 0.60"),
        (500, "0.0761 0.5272 0.610 0.451 0.61"),
    ),
    ("5,000", "Adam"): (
        (100, "0.0052 0.2179 0.546 0.395 0.63"),
        (250, "0.0062 0.2148 0.844 0.418 0.75"),
        (500, "0.0143 0.3460 0.999 0.421 0.87"),
    ),
    ("10,000", "gradient descent"): (
        (100, "0.0209 0.4184 0.401 0.397 0.52"),
        (250, "0.0385 0.4851 0.420 0.410 0.52"),
        (500, "0.0761 0.5287 0.514 0.473 0.54"),
    ),
    ("10,000", "Adam"): (
        (100, "0.0081 0.2501 0.477 0.443 0.56"),
        (250, "0.0208 0.3950 0.662 0.470 0.66"),
        (500, "0.0357 0.4930 0.937 0.474 0.73"),
    ),
    ("50,000", "gradient descent"): (
        (100, "0.0039 0.1929 0.419 0.400 0.55"),
        (500, "0.0563 0.5260 0.503 0.501 0.51"),
        (2000, "0.0693 0.5350 0.726 0.633 0.55"),
    ),
    ("50,000", "Adam"): (
        (100, "0.0109 0.3042 0.422 0.436 0.51"),
        (500, "0.0653 0.5585 0.546 0.541 0.52"),
        (2000, "0.0721 0.5727 0.730 0.596 0.57"),
    ),
}
_ATTACK_9, _MODEL_9 = ("mse", "lpips"), ("train_accuracy", "accuracy", "membership_auc")


def _of_table_9(images: str, optimizer: str, epochs: int, values: str) -> tuple[Item, Item]:
    """The attack, and the released models without it."""
    large = images == "50,000"
    attack = Factor(
        "factors_cifar10",
        "large" if large else "training",
        f"{epochs:,}",
        optimizer if large else f"{images} images, {optimizer}",
        _ATTACK_9,
    )
    model = Trained(int(images.replace(",", "")), optimizer, epochs)
    printed = dict(zip((*_ATTACK_9, *_MODEL_9), values.split(), strict=True))
    first, second = (", ".join(f"{WORDS[key][0]} {printed[key]}" for key in keys) for keys in (_ATTACK_9, _MODEL_9))
    shadows = ", shadows of CIFAR-100" if large else ""
    what = f"CIFAR-10, {images} known images, {optimizer}, {epochs:,} epochs"
    return (
        _of("table IX", f"{what}{shadows}", first, attack),
        Item(
            "table IX",
            f"{what}: the released model",
            second,
            model,
            "one model; accuracy and AUC on all images of the data that are not known",
            "`python -m benchmarks.released_training --cifar10 FILE --device cuda`",
        ),
    )


_TABLE_9_ITEMS = tuple(
    item
    for (images, optimizer), rows in _TABLE_9.items()
    for epochs, values in rows
    for item in _of_table_9(images, optimizer, epochs, values)
)
#: Newton's method in the settings of table IX: record, known images, epochs, printed MSE, number of targets.
_NEWTON = (
    ("cifar10_newton_10000", "10,000", 100, "0.0209", 8),
    ("cifar10_newton_50000", "50,000", 100, "0.0039", 4),
    ("cifar10_newton_250_steps", "5,000", 250, "0.0201", 8),
)
_NEWTON_ITEMS = tuple(
    Item(
        "table IX",
        f"CIFAR-10, {images} known images, gradient descent, {epochs} epochs: MSE, Newton's method in image space",
        printed,
        f"{{{record}: metrics.mse error}}, {{{record}: metrics.certified_rate .1%}} certified",
        f"the paper's network and training, no shadow models, {targets} targets",
        "`configs/reconn/cifar10_newton.yaml`, minutes of a GPU",
    )
    for record, images, epochs, printed, targets in _NEWTON
)
_LINEAR_ITEMS = tuple(
    _of(
        "table IX",
        f"CIFAR-10, {images} known images, gradient descent, 100 epochs: MSE, shadow models by linear response",
        printed,
        Factor("linear_factors_cifar10", "fixed", images),
    )
    for images, printed in (("1,000", "0.0041"), ("10,000", "0.0209"))
)
TABLES = (
    Item("table I", "notation", "no numbers", is_result=False),
    *_DEFAULTS,
    *_TABLE_2_ITEMS,
    *_TABLE_2_DIGITS,
    *_TABLE_3_ITEMS,
    *_TABLE_4_ITEMS,
    Item(
        "tables V to VIII",
        "sizes, networks and optimizers",
        "settings",
        needs="held by `configs/reconn/mnist_paper.yaml` and `configs/reconn/cifar10_paper.yaml`",
        is_result=False,
    ),
    *_TABLE_9_ITEMS,
    *_NEWTON_ITEMS,
    *_LINEAR_ITEMS,
)


def figure(number: str, quantity: str, ours: Factor, paper: str = "a plot") -> Item:
    """A plot whose values a study of factors holds."""
    return _of(f"figure {number}", quantity, paper, ours)


def picture(number: str, quantity: str, needs: str = _PAGES) -> Item:
    """A figure without a counterpart among the records."""
    return Item(f"figure {number}", quantity, "a picture or plot", needs=needs)


def curve(number: str, quantity: str, paper: str) -> Item:
    """The error by the number of shadow models of the kernel ridge on the first layer."""
    setting = "500 known images, kernel ridge on the first layer, 200 targets"
    return Item(f"figure {number}", quantity, paper, factors.curve, setting, "`configs/reconn/mnist_small.yaml`")
