"""Labels from the head's gradient, against batches whose labels the tests know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.labels.counts import lower_bounds
from lit_recon.attacks.updates.labels.head import find_head, head_gradient, probe_inputs
from lit_recon.attacks.updates.labels.recovery import IDLG, HeadCounts, JointLabels, KnownLabels, LabelRecovery
from lit_recon.clients import BatchNormMode, GradientOperator, LocalSteps
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models import MLP, Backbone, ResNet18, WideFeatureLayer
from lit_recon.records import Batch, ForwardOperator, Knowledge, Normalization, Observation, Weights

GRAY = Normalization((0.5,), (0.25,))


class Perceptron(nn.Module):
    """One hidden layer, no attribute called head."""

    def __init__(self, n_classes: int, activation: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), activation, nn.Linear(48, n_classes, bias=bias))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def observe(
    model: nn.Module,
    labels: list[int],
    seed: int = 0,
    mode: BatchNormMode = "eval",
    known: bool = False,
    adam: int = 0,
    sgd: dict[str, Any] | None = None,
) -> Observation:
    """What a client with random 8x8 images of these labels releases; `adam`: after so many steps of Adam, or `sgd`."""
    images, classes = (
        torch.rand(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(seed)),
        torch.tensor(labels),
    )
    operator: ForwardOperator = GradientOperator(model, mode)
    weights = Weights.of(model)
    if adam:
        operator = LocalSteps(model, adam, 1e-3, batch_norm=mode, optimizer="adam")
    if sgd is not None:
        operator = LocalSteps(model, batch_norm=mode, **sgd)
    update = operator(weights, Batch(images, classes))
    n_classes = model(images).shape[1]
    told = classes if known else None
    facts = (len(labels), (1, 8, 8), n_classes, GRAY, Knowledge(labels=known), told)
    return Observation(model, *weights, operator, update, *facts)


class Flat(nn.Linear):
    """A head that is the whole model."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))


class Reversed(nn.Module):
    """The head is registered before a hidden layer with as many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.hidden = nn.Linear(5, 5), nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.hidden(images.flatten(1)).relu())
        return logits


class Functional(nn.Module):
    """A head that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.hidden = nn.Parameter(torch.randn(4, 64)), nn.Linear(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(self.hidden(images.flatten(1)), self.weight)


@pytest.mark.parametrize(
    ("model", "weight", "bias"),
    [
        (Backbone(MLP((1, 8, 8), [5]), 5, GRAY), "head.weight", "head.bias"),
        (Perceptron(4, nn.ReLU()), "layers.3.weight", "layers.3.bias"),
        (Perceptron(4, nn.ReLU(), bias=False), "layers.3.weight", None),
        (Flat(64, 2), "weight", "bias"),
        (Reversed(), "classifier.weight", "classifier.bias"),
    ],
)
def test_head_is_the_layer_that_returns_the_logits(model: nn.Module, weight: str, bias: str | None) -> None:
    assert find_head(observe(model, [0]), "this test") == (weight, bias)


def test_model_without_a_head_is_refused() -> None:
    expected = r"HeadCounts needs .* 4 logits; Functional has no such layer \(linear .* own: hidden\): .*KnownLabels"
    with pytest.raises(UnsupportedModelError, match=expected):
        HeadCounts().check(observe(Functional(), [0, 1]))


@pytest.mark.parametrize(("method", "labels"), [(IDLG(), [2]), (HeadCounts(), [2]), (HeadCounts(), [2, 1])])
def test_another_loss_than_cross_entropy_is_refused(method: LabelRecovery, labels: list[int]) -> None:
    seen = replace(observe(Perceptron(4, nn.ReLU()), labels), loss=nn.functional.multi_margin_loss)
    method.check(replace(seen, loss=nn.functional.cross_entropy))
    name = "HeadCounts" if len(labels) > 1 else "IDLG"
    with pytest.raises(ThreatModelError, match=f"{name} assumes .* their loss is multi_margin_loss: .*KnownLabels"):
        method.check(seen)
    with pytest.raises(ThreatModelError, match="multi_margin_loss"):
        method(seen)


def test_labels_are_optimized_only_in_a_loss_that_takes_probabilities() -> None:
    seen = observe(Perceptron(4, nn.ReLU()), [2, 1])
    JointLabels().check(seen)
    JointLabels().check(replace(seen, loss=nn.CrossEntropyLoss(label_smoothing=0.1)))
    with pytest.raises(
        ThreatModelError, match="JointLabels .*multi_margin_loss fails on .*probabilities .*KnownLabels"
    ):
        JointLabels().initial_logits(replace(seen, loss=nn.functional.multi_margin_loss), torch.Generator())


def test_known_labels_come_back_sorted() -> None:
    labels, notes = KnownLabels()(observe(Perceptron(4, nn.ReLU()), [3, 0, 3, 1], known=True))
    assert labels.tolist() == [0, 1, 3, 3]
    assert notes == ()


@pytest.mark.parametrize("recovery", [KnownLabels(), IDLG(), HeadCounts(), JointLabels()])
@pytest.mark.parametrize("parts", [1, 2])
def test_labels_that_are_given_are_recovered_by_nobody(recovery: LabelRecovery, parts: int) -> None:
    """Not even asked for is what a recovery needs: a head here, one image, the cross-entropy."""
    steps = {"steps": parts, "lr": 0.1, "batches": parts}
    seen = replace(observe(Functional(), [3, 0, 2, 1], known=True, sgd=steps), loss=nn.functional.multi_margin_loss)
    recovery.check(seen)
    labels, notes = recovery(seen)
    # in the client's order where that tells its mini-batches
    assert labels.tolist() == ([0, 1, 2, 3] if parts == 1 else [3, 0, 2, 1])
    assert notes == ()
    assert not recovery.optimizes(seen)


def test_hidden_labels_are_not_known() -> None:
    with pytest.raises(ThreatModelError, match=r"knowledge\.labels=true"):
        KnownLabels()(observe(Perceptron(4, nn.ReLU()), [3, 0]))


@pytest.mark.parametrize("recovery", [IDLG(), HeadCounts()])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize("n_classes", [2, 5])
def test_one_label_is_exact(recovery: LabelRecovery, activation: nn.Module, n_classes: int) -> None:
    torch.manual_seed(0)
    model = Perceptron(n_classes, activation)
    for label in range(n_classes):
        found, notes = recovery(observe(model, [label], seed=label))
        assert (found.tolist(), found.dtype, notes) == ([label], torch.int64, ())


@pytest.mark.parametrize(("n_classes", "activation"), [(2, nn.ReLU()), (5, nn.ReLU()), (5, nn.Tanh())])
def test_one_label_needs_no_bias(n_classes: int, activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = Perceptron(n_classes, activation, bias=False)
    for label in range(n_classes):
        assert IDLG()(observe(model, [label], seed=label))[0].tolist() == [label]


def test_one_label_of_two_classes_without_bias_or_sign_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="two classes"):
        IDLG()(observe(Perceptron(2, nn.Tanh(), bias=False), [1]))


def without_bias_entries(seen: Observation) -> Observation:
    return replace(seen, update={**seen.update, "layers.3.bias": torch.zeros(seen.n_classes)})


@pytest.mark.parametrize("recovery", [IDLG(), HeadCounts()])
@pytest.mark.parametrize(("n_classes", "activation"), [(2, nn.ReLU()), (5, nn.ReLU()), (5, nn.Tanh())])
def test_rows_tell_one_label_where_the_bias_was_not_sent(
    recovery: LabelRecovery, n_classes: int, activation: nn.Module
) -> None:
    torch.manual_seed(0)
    model = Perceptron(n_classes, activation)
    for label in range(n_classes):
        assert recovery(without_bias_entries(observe(model, [label], seed=label))) == (torch.tensor([label]), ())


@pytest.mark.parametrize("recovery", [IDLG(), HeadCounts()])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize("n_classes", [2, 5])
def test_rows_tell_one_label_whose_bias_entry_was_not_sent(
    recovery: LabelRecovery, activation: nn.Module, n_classes: int
) -> None:
    """The other entries are positive, or hidden, too; with two classes, the other tells."""
    torch.manual_seed(0)
    model = Perceptron(n_classes, activation)
    for label in range(n_classes):
        seen = observe(model, [label], seed=label)
        for hidden in ([label], [label, (label + 1) % 5][: n_classes - 1], [label, (label - 1) % 5][: n_classes - 1]):
            bias = seen.update["layers.3.bias"].clone()
            bias[hidden] = 0.0
            found, notes = recovery(replace(seen, update={**seen.update, "layers.3.bias": bias}))
            assert (found.tolist(), notes) == ([label], ())


@pytest.mark.parametrize(("adam", "activation"), [(1, nn.Tanh()), (0, nn.ReLU())])
def test_a_label_of_which_nothing_is_left_is_called_a_guess(adam: int, activation: nn.Module) -> None:
    """After Adam, the rows of inputs of any sign tell nothing; with one step of SGD, they are hidden here."""
    seen = observe(Perceptron(5, activation), [3], adam=adam)
    bias, rows = seen.update["layers.3.bias"].clone(), seen.update["layers.3.weight"]
    bias[3] = 0.0
    left = {"layers.3.bias": bias, "layers.3.weight": rows if adam else torch.zeros_like(rows)}
    _, notes = IDLG()(replace(seen, update={**seen.update, **left}))
    assert notes == ("labels: the gradient of the head does not tell the label, which is a guess",)


def test_one_label_without_bias_entries_or_sign_is_refused_before_the_attack() -> None:
    seen = observe(Perceptron(2, nn.Tanh()), [1])
    IDLG().check(seen)
    with pytest.raises(UnsupportedModelError, match="two classes"):
        IDLG().check(without_bias_entries(seen))


def test_idlg_refuses_a_batch() -> None:
    with pytest.raises(ThreatModelError, match="has 2: use HeadCounts"):
        IDLG()(observe(Perceptron(4, nn.ReLU()), [1, 2]))


def test_zero_gradient_is_called_a_guess() -> None:
    seen = observe(Perceptron(4, nn.ReLU()), [1])
    silent = replace(seen, update={name: torch.zeros_like(value) for name, value in seen.update.items()})
    assert "guess" in IDLG()(silent)[1][0]
    labels, notes = HeadCounts()(replace(silent, n_examples=3))
    assert len(labels) == 3
    assert "estimated" in notes[0]
    assert "without a search" in notes[0]


def test_probe_tells_relu_from_tanh_and_changes_nothing() -> None:
    model = Backbone(ResNet18((1, 8, 8), width=4), 3, GRAY).eval()
    seen = observe(model, [0, 1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert (probe_inputs(seen) >= 0).all()
    assert head_gradient(seen).non_negative
    assert not head_gradient(observe(Perceptron(3, nn.Tanh()), [0, 1])).non_negative
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0.0, atol=0.0)


def test_result_depends_on_the_seed_alone() -> None:
    seen = observe(Perceptron(5, nn.Tanh()), [0, 0, 3])
    first, again = (HeadCounts(trials=4, seed=1)(seen) for _ in range(2))
    assert (first[0].tolist(), first[1]) == (again[0].tolist(), again[1])


@pytest.mark.parametrize(
    ("model", "spread", "labels", "told"),
    [
        (Perceptron(6, nn.ReLU()), 0.2, [0, 1], "only ones within the bounds"),
        (Perceptron(3, nn.Tanh()), 0.01, [0, 1, 1, 2, 2, 2], "are whole numbers"),
        (Perceptron(6, nn.Tanh()), 1.0, [0, 2, 2], "up to rounding"),
    ],
)
def test_notes_say_how_sure_the_counts_are(model: nn.Module, spread: float, labels: list[int], told: str) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=spread)
    found, notes = HeadCounts()(observe(model, labels))
    assert found.tolist() == labels
    assert told in notes[0]


@pytest.mark.parametrize(
    "sgd",
    [{"steps": 3, "batches": 2}, {"steps": 5, "batches": 4}, {"steps": 2, "batches": 2, "momentum": 0.9}],
    ids=["3 of 2", "5 of 4", "momentum"],
)
def test_bounds_hold_where_some_images_count_more(sgd: dict[str, Any]) -> None:
    torch.manual_seed(0)
    for seed in range(5):
        seen = observe(Perceptron(10, nn.ReLU()), [0, 0, 0, 1, 2, 2, 2, 2], seed, sgd={"lr": 0.01, **sgd})
        lower = lower_bounds(head_gradient(seen))
        assert (lower <= torch.tensor([3, 1, 4] + 7 * [0])).all()
        assert lower.sum() >= 5


def test_a_difference_of_weights_is_counted_in_units_of_a_gradient() -> None:
    torch.manual_seed(0)
    model, sgd = Perceptron(5, nn.ReLU()), {"steps": 2, "lr": 0.01, "layer_lrs": {"layers.3.bias": 0.1}}
    labels = [0, 0, 0, 1, 4]
    gradient, difference = (observe(model, labels, sgd={**sgd, "release": form}) for form in ("gradient", "difference"))
    torch.testing.assert_close(head_gradient(difference).bias_gradient, head_gradient(gradient).bias_gradient)
    torch.testing.assert_close(head_gradient(difference).weight_gradient, head_gradient(gradient).weight_gradient)
    found, [note] = HeadCounts(trials=0)(difference)
    assert found.tolist() == labels
    assert "are whole numbers" in note


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_counts_behind_batch_norm_in_either_mode(mode: BatchNormMode) -> None:
    torch.manual_seed(0)
    model = Backbone(ResNet18((1, 8, 8), width=8), 6, GRAY)
    labels, notes = HeadCounts()(observe(model.eval(), [5, 0, 2, 5], seed=2, mode=mode))
    assert labels.tolist() == [0, 2, 5, 5]
    assert notes[0].startswith("labels: class counts")


def test_counts_behind_a_wide_feature_layer() -> None:
    torch.manual_seed(0)
    layer = WideFeatureLayer(32, n_neurons=64, n_trained=16, activation="gelu")
    model = Backbone(MLP((1, 8, 8), [32], activation="gelu"), 6, GRAY, layer)
    assert HeadCounts()(observe(model, [4, 1, 4]))[0].tolist() == [1, 4, 4]


def test_counts_need_a_bias() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'layers\.3' has none: .*KnownLabels"):
        HeadCounts()(observe(Perceptron(4, nn.ReLU(), bias=False), [0, 1]))


def test_negative_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="trials of at least 0"):
        HeadCounts(trials=-1)


def test_joint_labels_start_from_standard_normal_logits() -> None:
    seen = observe(Perceptron(40, nn.ReLU()), [1, 2, 3] * 20)
    recovery = JointLabels()
    logits = recovery.initial_logits(seen, torch.Generator().manual_seed(0))
    again = recovery.initial_logits(seen, torch.Generator().manual_seed(0))
    assert recovery.can_optimize
    assert logits.shape == (60, 40)
    assert abs(logits.mean()) < 0.1
    assert abs(logits.std() - 1) < 0.1
    torch.testing.assert_close(logits, again, rtol=0.0, atol=0.0)
    assert recovery(seen)[0].shape == (60,)


@pytest.mark.parametrize("recovery", [KnownLabels(), IDLG(), HeadCounts()])
def test_recovered_labels_have_no_logits(recovery: LabelRecovery) -> None:
    assert not recovery.can_optimize
    with pytest.raises(ConfigError, match=f"{type(recovery).__name__} .*JointLabels"):
        recovery.initial_logits(observe(Perceptron(4, nn.ReLU()), [0, 1]), torch.Generator())


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("label", [0, 3])
def test_signs_tell_the_label_of_one_image(steps: int, bias: bool, label: int) -> None:
    """The rows of a head without a bias are equally long after Adam: only their signs differ."""
    torch.manual_seed(2)
    model = Perceptron(5, nn.ReLU(), bias)
    found, _ = IDLG()(observe(model, [label], adam=steps))
    assert found.tolist() == [label]


@pytest.mark.parametrize("labels", [[1, 4, 7], [0, 2, 3, 5, 8, 9], [6, 6, 6]])
def test_signs_tell_which_classes_there_are(labels: list[int]) -> None:
    torch.manual_seed(0)
    found, [note] = HeadCounts()(observe(Perceptron(10, nn.ReLU()), labels, adam=1))
    assert found.tolist() == labels
    assert "estimated" in note


def test_classes_with_more_images_have_more_negative_signs() -> None:
    torch.manual_seed(0)
    found, _ = HeadCounts()(observe(Perceptron(10, nn.ReLU()), [2] * 7 + [5] * 3, adam=1))
    assert len(found) == 10
    assert set(found.tolist()) == {2, 5}
    assert (found == 2).sum() > 5
