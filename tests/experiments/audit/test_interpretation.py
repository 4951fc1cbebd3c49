"""What an update is: form, sign, scale, weight decay, BatchNorm and zeros, against clients whose training is known."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lit_recon.clients import LocalSteps
from lit_recon.errors import ConfigError
from lit_recon.experiments.audit.evidence import Finding, read_evidence
from lit_recon.experiments.audit.interpretation import interpret
from lit_recon.experiments.audit.statistics import normalization_finding
from lit_recon.models import public_model
from lit_recon.records import Batch, Normalization, Update
from tests.experiments.audit.updates import (
    NORMALIZATION,
    SHAPE,
    convnet,
    doubts,
    gradient,
    images,
    interpreted,
    labels,
    mlp,
    trained,
    unlabelled,
    update,
)


def assert_close(one: Update, two: Update, rtol: float = 1e-3) -> None:
    """Equal up to the rounding of weights that moved by little."""
    least = 1e-4 * max(float(value.abs().max()) for value in two.values())
    for name, value in two.items():
        torch.testing.assert_close(one[name], value, rtol=rtol, atol=least, msg=name)


@pytest.mark.parametrize("n", [1, 4, 32])
def test_new_weights_of_an_honest_client_agree_with_everything(n: int) -> None:
    found = interpreted(convnet(), update(convnet(), n))
    assert doubts(found) == []
    assert found.form == "weights"
    assert_close(found.update, gradient(convnet(), n))


@pytest.mark.parametrize("n", [1, 8, 32])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_wrong_learning_rate_is_noticed_and_corrected(n: int, factor: float) -> None:
    found = interpreted(convnet(), update(convnet(), n, {"lr": 0.1 * factor}))
    [doubt] = doubts(found)
    assert "times as large as a mean gradient would be, and lr would be" in doubt
    own, true = (
        float(torch.cat([v.flatten() for v in u.values()]).norm()) for u in (found.update, gradient(convnet(), n))
    )
    assert 0.7 < own / true < 1.4  # the rate is estimated from probabilities of noise images


@pytest.mark.parametrize("n", [1, 4, 32])
def test_weights_after_minus_before_are_turned_around(n: int) -> None:
    recorded = update(convnet(), n)
    sent = {name: value - recorded.before[name] for name, value in recorded.sent.items()}
    found = interpreted(convnet(), unlabelled(recorded, sent))
    assert found.form == "difference"
    assert any("sign is reversed" in doubt for doubt in doubts(found))
    assert_close(found.update, gradient(convnet(), n))


def test_a_gradient_is_told_from_a_difference_by_its_scale() -> None:
    recorded = update(convnet(), 4, {"lr": 0.01})
    found = interpreted(convnet(), unlabelled(recorded, gradient(convnet(), 4)))
    assert found.form == "gradient"
    assert_close(found.update, gradient(convnet(), 4), rtol=1e-6)


def test_a_difference_without_a_learning_rate_is_brought_to_scale() -> None:
    recorded = update(convnet(), 8, {"lr": None})
    found = interpreted(convnet(), recorded)
    assert any("No learning rate was given" in finding.text for finding in found.findings)
    own, true = (float(u["0.weight"].norm()) for u in (found.update, gradient(convnet(), 8)))
    assert 0.7 < own / true < 1.4


def norm(one: Update) -> float:
    return float(torch.cat([value.flatten() for value in one.values()]).norm())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_gradient_that_was_not_named_has_its_exact_length(sign: int, steps: int) -> None:
    """The given rate, 0.03, is no power of ten on the grid of scales."""
    after = trained(convnet(), 1, lr=0.03, steps=steps)
    recorded = update(convnet(), 1, {"lr": 0.03, "steps": steps}, lr=0.03, steps=steps)
    honest = interpreted(convnet(), recorded)
    new = dict(after.named_parameters())
    sent = {name: sign * (recorded.before[name] - new[name].detach()) / 0.03 for name in new}
    found = interpreted(convnet(), unlabelled(recorded, sent))
    assert found.form == "gradient"
    assert found.scaled
    assert norm(found.update) == pytest.approx(norm(honest.update), rel=1e-3)


def test_an_estimated_scale_does_not_depend_on_the_rate() -> None:
    """Between the steps of a grid, too, of which 0.1 is one and 0.106 is none."""
    one, two = (interpreted(convnet(), update(convnet(), 2, {"lr": None}, lr=lr)) for lr in (0.1, 0.106))
    assert norm(one.update) == pytest.approx(norm(two.update), rel=1e-3)
    assert not one.scaled


def test_a_wrong_form_is_noticed() -> None:
    recorded = replace(update(mlp(), 4), form="gradient")
    found = interpreted(mlp(), recorded)
    assert found.form == "weights"
    assert any("is said to be a gradient" in doubt for doubt in doubts(found))
    assert_close(found.update, gradient(mlp(), 4))


def test_a_sum_over_images_is_noticed() -> None:
    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets, reduction="sum")

    found = interpreted(convnet(), update(convnet(), 8, loss=summed))
    [doubt] = doubts(found)
    assert "a sum over the images instead of their mean" in doubt


@pytest.mark.parametrize("claimed", [0.0, 0.01])
def test_weight_decay_beyond_the_claimed_one_is_found_and_taken_off(claimed: float) -> None:
    found = interpreted(convnet(), update(convnet(), 4, {"weight_decay": claimed}, weight_decay=0.02))
    [doubt] = doubts(found)
    assert doubt.startswith("The update holds weight decay of 0.02, ")
    assert_close(found.update, gradient(convnet(), 4), rtol=1e-2)


def test_weight_decay_that_was_told_is_taken_off() -> None:
    found = interpreted(convnet(), update(convnet(), 4, {"weight_decay": 0.02}, weight_decay=0.02))
    assert doubts(found) == []
    assert_close(found.update, gradient(convnet(), 4))


def test_another_loss_is_noticed() -> None:
    def squares(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits - nn.functional.one_hot(targets, 10)).square().mean()

    found = interpreted(mlp(), update(mlp(), 4, loss=squares))
    assert any("do not add to zero" in doubt for doubt in doubts(found))


def test_more_images_than_claimed_are_noticed_by_the_rank() -> None:
    found = interpreted(mlp(), update(mlp(), 6, {"batch_size": 2}))
    assert any("has rank 6, but 2 images can give rank 2" in doubt for doubt in doubts(found))


def test_statistics_of_the_batch_follow_from_those_that_ran() -> None:
    model = convnet(norm=True)
    found = interpreted(model, update(model, 4))
    assert doubts(found) == []
    assert found.known.batch_norm == "train"
    inputs = model[0]((images(4) - 0.5) / 0.25)
    assert found.statistics is not None
    torch.testing.assert_close(found.statistics["1"].mean, inputs.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    var = inputs.var(dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(found.statistics["1"].var, var, rtol=1e-3, atol=1e-5)
    assert_close(found.update, gradient(model, 4, "train"))


def test_statistics_in_a_difference_are_the_same() -> None:
    model = convnet(norm=True)
    recorded = update(model, 4)
    expected = interpreted(model, recorded).statistics
    for sign in (1, -1):
        sent = {name: sign * (value - recorded.before[name]) for name, value in recorded.sent.items()}
        statistics = interpreted(model, unlabelled(recorded, sent)).statistics
        assert statistics is not None
        assert expected is not None
        torch.testing.assert_close(statistics["1"].var, expected["1"].var, rtol=1e-3, atol=1e-5)


def test_buffers_that_stayed_say_evaluation_mode() -> None:
    model = convnet(norm=True)
    recorded = update(model, 4, {"batch_norm": "train"})
    sent = {**recorded.sent, **{name: recorded.before[name] for name in recorded.before if "running" in name}}
    found = interpreted(model, replace(recorded, sent=sent))
    assert found.known.batch_norm == "eval"
    assert any("it used its running statistics" in doubt for doubt in doubts(found))


def test_steps_are_counted_by_batch_norm() -> None:
    model = convnet(norm=True)
    found = interpreted(model, update(model, 4, steps=3))
    assert found.known.steps == 3
    assert any("counted 3 batches" in doubt for doubt in doubts(found))
    assert found.statistics is None


def test_local_steps_are_simulated_as_they_were_made() -> None:
    recorded = update(convnet(), 4, {"steps": 3, "momentum": 0.5}, steps=3, momentum=0.5)
    found = interpreted(convnet(), recorded)
    assert doubts(found) == []
    public = public_model(convnet(), SHAPE, NORMALIZATION)
    seen = found.observation(public, None, None)
    assert isinstance(seen.operator, LocalSteps)
    assert_close(seen.operator(seen.weights, Batch(images(4), labels(4))), found.update, rtol=1e-2)


def test_momentum_that_was_not_told_is_noticed() -> None:
    found = interpreted(convnet(), update(convnet(), 4, {"steps": 3}, steps=3, momentum=0.9))
    assert any("or momentum" in doubt for doubt in doubts(found))


@pytest.mark.parametrize("drop", [0.3, 0.9])
def test_dropped_entries_are_unknown_to_the_attacker(drop: float) -> None:
    model = convnet()
    recorded = replace(update(model, 4), sent=gradient(model, 4), form="gradient")
    torch.manual_seed(1)
    sent = {name: torch.where(torch.rand_like(value) < drop, 0.0, value) for name, value in recorded.sent.items()}
    found = interpreted(model, replace(recorded, sent=sent))
    assert found.simulated is not None
    assert found.simulated.reads_zeros
    assert interpreted(model, recorded).simulated is None


def test_small_gradients_are_no_rounded_weights() -> None:
    """Entries of a gradient may be smaller than the last digits of the weights, and dropped all the same."""
    model = convnet()
    torch.manual_seed(1)
    small = {name: 1e-9 * torch.where(torch.rand_like(v) < 0.3, 0.0, v) for name, v in gradient(model, 4).items()}
    found = interpreted(model, replace(update(model, 4), sent=small, form="gradient"))
    assert found.simulated is not None


def test_weights_that_did_not_move_are_refused() -> None:
    recorded = update(convnet(), 4)
    with pytest.raises(ConfigError, match="the weights that were sent are those before"):
        interpreted(convnet(), replace(recorded, sent=recorded.before))


@pytest.mark.parametrize("larger", [1, 1000])
@pytest.mark.parametrize("fraction", [0.7, 0.9])
def test_pruned_entries_are_unknown_to_the_attacker(fraction: float, larger: float) -> None:
    """Pruning of the whole update leaves a layer with a much larger gradient as it is."""
    whole = dict(gradient(convnet(), 4))
    whole["0.weight"] = larger * whole["0.weight"]
    threshold = torch.cat([value.abs().flatten() for value in whole.values()]).quantile(fraction)
    sent = {name: torch.where(value.abs() > threshold, value, 0.0) for name, value in whole.items()}
    found = interpreted(convnet(), unlabelled(update(convnet(), 4), sent))
    assert any("scattered places" in finding.text for finding in found.findings)
    assert found.simulated is not None


def test_zeros_of_sparse_maps_are_no_dropped_entries() -> None:
    """Few positions of few active maps: many pairs of entries of a filter never meet."""
    torch.manual_seed(0)
    channels, layers = (1, 16, 64, 64), list[nn.Module]()
    for number, stride in enumerate((2, 2, 1)):
        layers += [nn.Conv2d(*channels[number : number + 2], 3, stride, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    zeros = gradient(model, 1)["4.weight"] == 0
    rows = zeros.flatten(1)[~zeros.flatten(1).all(dim=1)]
    assert (rows[:, ~rows.all(dim=0)]).double().mean() > 0.05
    found = interpreted(model, update(model, 1))
    assert found.simulated is None
    assert doubts(found) == []


def test_zeros_of_a_rounding_are_no_dropped_entries() -> None:
    """At a tiny learning rate many weights do not move at all."""
    model = convnet()
    recorded = update(model, 4, {"lr": 1e-6}, lr=1e-6)
    conv = recorded.sent["0.weight"] - recorded.before["0.weight"]
    assert float((conv == 0).double().mean()) > 0.1
    assert interpreted(model, recorded).simulated is None


def test_parameters_that_were_not_sent_are_unknown() -> None:
    recorded = update(mlp(), 4)
    sent = {name: value for name, value in recorded.sent.items() if not name.startswith("1.")}
    found = interpreted(mlp(), replace(recorded, sent=sent))
    assert found.simulated is not None
    assert not found.update["1.weight"].any()


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"batch_size": None}, "batch_size is not known"),
        ({"lr": None, "steps": 2}, "lr is not known: 2 local steps"),
        ({"lr": None, "weight_decay": 0.1}, "lr is not known: weight decay of 0.1 cannot be taken off new weights"),
    ],
)
def test_what_no_attack_can_do_without_is_asked_for(known: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        interpreted(mlp(), update(mlp(), 4, known))


def test_a_network_without_a_linear_head_is_not_checked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    found = interpreted(model, update(model, 2))
    assert any(one.kind == "open" and "could not be checked" in one.text for one in found.findings)
    assert all(math.isfinite(float(value.sum())) for value in found.update.values())


def test_findings_are_sentences() -> None:
    found = interpreted(convnet(norm=True), update(convnet(norm=True), 4))
    assert all(isinstance(one, Finding) and one.text[0].isupper() and one.text.endswith(".") for one in found.findings)


@pytest.fixture(scope="module")
def with_statistics() -> nn.Module:
    """A network whose running statistics are those of many images under `NORMALIZATION`."""
    model = convnet(norm=True).train()
    with torch.no_grad():
        for seed in range(40):
            model((images(64, seed % 4) - 0.5) / 0.25)
    return model.eval()


@pytest.mark.parametrize(
    ("normalization", "kind"),
    [
        (NORMALIZATION, "fits"),
        (Normalization((0.0,), (1.0,)), "doubt"),
        (Normalization((0.5,), (0.05,)), "doubt"),
        (Normalization((2.0,), (0.25,)), "doubt"),
    ],
    ids=["right", "none", "too small", "shifted"],
)
def test_statistics_of_the_first_layer_show_a_wrong_normalization(
    with_statistics: nn.Module, normalization: Normalization, kind: str
) -> None:
    recorded = update(with_statistics, 4)
    public = public_model(with_statistics, SHAPE, normalization)
    found = interpret(public, read_evidence(with_statistics, recorded), recorded.form, recorded.known)
    [told] = [one for one in found.findings if "first BatchNorm layer" in one.text]
    assert told.kind == kind


def test_pixels_are_those_of_the_images(with_statistics: nn.Module) -> None:
    finding = normalization_finding(public_model(with_statistics, SHAPE, NORMALIZATION))
    assert finding is not None
    mean, spread = (float(text.strip(",")) for text in re.findall(r"0\.\d+,?", finding.text)[:2])
    pixels = torch.cat([images(64, seed) for seed in range(4)])
    assert mean == pytest.approx(float(pixels.mean()), abs=0.15)  # padding is black, and counts
    assert spread == pytest.approx(float(pixels.std()), rel=0.4)  # other correlations than those of photographs


def trained_briefly() -> nn.Module:
    """Most of its statistics are still zeros and ones."""
    model = convnet(norm=True).train()
    nn.init.zeros_(model[0].bias)
    with torch.no_grad():
        model((images(64) - 0.5) / 0.25)
    return model.eval()


@pytest.mark.parametrize("model", [mlp(), convnet(), trained_briefly()], ids=["linear", "no norm", "new"])
def test_other_first_layers_and_new_statistics_tell_nothing(model: nn.Module) -> None:
    assert normalization_finding(public_model(model, SHAPE, NORMALIZATION)) is None


def test_means_that_no_pixels_have_tell_nothing(with_statistics: nn.Module) -> None:
    model = copy.deepcopy(with_statistics)
    model[1].running_mean.copy_(torch.tensor([5.0, -5.0] * 4))
    assert normalization_finding(public_model(model, SHAPE, NORMALIZATION)) is None


def test_the_order_of_later_epochs_is_open() -> None:
    recorded = update(convnet(), 4, {"steps": 4, "batches": 2})
    assert any("order of the images in later epochs" in one.text for one in interpreted(convnet(), recorded).findings)
    one_epoch = update(convnet(), 4, {"steps": 2, "batches": 2})
    assert not any("later epochs" in one.text for one in interpreted(convnet(), one_epoch).findings)


def test_more_images_than_claimed_leave_sign_and_scale_open() -> None:
    """Their labels are no whole numbers of the claimed ones, and no scale may be read from that."""
    model = convnet()
    with torch.no_grad():
        model[-1].bias[1] = 12.0  # all images are taken for class 1: equal probabilities, as if they were known
    found = interpreted(model, update(model, 2, {"batch_size": 1}))
    [doubt] = doubts(found)
    assert doubt.startswith("The head's gradient has rank 2, but 1 image can give rank 1 at most")
    assert_close(found.update, gradient(model, 2))


def test_probabilities_are_those_of_the_clients_batch_norm() -> None:
    """Running statistics of another training would tell other probabilities, and from them a wrong scale."""
    model = convnet(norm=True)
    model[1].running_mean.fill_(4.0)
    with torch.no_grad():
        model[-1].weight.mul_(4)
    found = interpreted(model, update(model, 1))
    assert doubts(found) == []
    assert found.known.batch_norm == "train"
