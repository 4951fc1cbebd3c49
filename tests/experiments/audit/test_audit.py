"""Audits from Python: what came back, defenses, agreement with the learning rate, and the files of the run folder."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lit_recon
from lit_recon.cli import attack
from lit_recon.clients.record import RecordedUpdate, Recorder
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.experiments.audit import attacks, run
from lit_recon.experiments.audit.attacks import CANDIDATES, Outcome, best, read_outcome
from lit_recon.experiments.audit.evidence import read_evidence
from lit_recon.experiments.audit.interpretation import interpret
from lit_recon.experiments.audit.page import verdict
from lit_recon.experiments.audit.protection import DEFENSES
from lit_recon.experiments.audit.run import AuditSettings
from lit_recon.experiments.audit.score import AuditResult, agreement
from lit_recon.models import Backbone, ConvNet, public_model
from lit_recon.records import Normalization, Reconstruction
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar
from tests.experiments.audit.updates import (
    NORMALIZATION,
    SHAPE,
    convnet,
    gradient,
    images,
    labels,
    mlp,
    unlabelled,
    update,
)

CHEAP = ["analytic"]


def audited(n: int = 1, recorded: RecordedUpdate | None = None, **how: object) -> AuditResult:
    chosen = {"attacks": CHEAP, "minutes": 1.0, **how}
    return lit_recon.audit(mlp(), recorded or update(mlp(), n), SHAPE, NORMALIZATION, **chosen)  # type: ignore[arg-type]


def test_a_single_image_of_a_fully_connected_network_comes_back() -> None:
    result = audited()
    chosen = result.best
    assert chosen is not None
    errors = result.rmse(chosen)
    assert errors is not None
    assert float(errors.max()) < 1e-3  # 1e-5 at the time of writing: the rounding of weights that moved
    assert result.metrics()["rmse"] == pytest.approx(float(errors.mean()))
    assert result.metrics()["rmse_worst"] == float(errors.max())
    assert not [finding for finding in result.findings if finding.kind == "doubt"]


def test_truth_serves_scores_only() -> None:
    """The same images come back without it."""
    recorded = update(mlp(), 1)
    with_truth, without = audited(recorded=recorded), audited(recorded=replace(recorded, truth={}))
    assert with_truth.images is not None
    assert without.images is not None
    torch.testing.assert_close(with_truth.images, without.images)
    assert without.metrics()["rmse"] is None


def test_true_images_may_have_no_labels(tmp_path: Path) -> None:
    recorded = update(mlp(), 1)
    both, alone = (audited(1, one) for one in (recorded, replace(recorded, truth={"images": images(1)})))
    assert both.truth is not None
    assert both.truth[1] is not None
    assert alone.truth is not None
    assert alone.truth[1] is None
    assert alone.metrics()["rmse"] == both.metrics()["rmse"]
    for result, there in ((both, True), (alone, False)):
        path = RunFolder(result.save(tmp_path / f"{there}").parent).reconstructions
        assert ("labels" in load_file(path)) is there


def test_a_wrong_learning_rate_shows_in_the_length_of_the_update() -> None:
    """Where the head alone cannot tell, as the outputs of the network differ much between images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[3].weight.mul_(20)
    result = lit_recon.audit(model, update(model, 1, {"lr": 0.3}), SHAPE, NORMALIZATION, attacks=CHEAP, minutes=1)
    [doubt] = [finding.text for finding in result.findings if finding.kind == "doubt"]
    assert "0.333 times as long" in doubt or "times as large" in doubt


@pytest.mark.parametrize("training", [False, True])
def test_a_model_of_this_package_keeps_its_weights(training: bool) -> None:
    """Running statistics of BatchNorm are among them, which a forward pass in training mode moves."""
    client, own = (Backbone(ConvNet(SHAPE, widths=[4]), 10, NORMALIZATION).train(training) for _ in range(2))
    recorded = update(client, 1)
    before = copy.deepcopy(own.state_dict())
    case = run._prepared(own, recorded, None, None, nn.functional.cross_entropy, None, None)
    for state, expected in ((own.state_dict(), before), (case.public.model.state_dict(), recorded.before)):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert own.training is training


@pytest.mark.parametrize("lr", [None, 0.03])
def test_exact_images_leave_no_doubt_in_the_learning_rate(lr: float | None) -> None:
    """Of weights without a rate, whose scale is estimated, and of a gradient that was not named one."""
    recorded = update(mlp(), 1, {"lr": lr}, lr=0.03)
    result = audited(recorded=recorded if lr is None else unlabelled(recorded, dict(gradient(mlp(), 1))))
    assert result.best is not None
    assert result.best.certified == 1
    assert result.best.distance < 1e-5
    assert not [finding.text for finding in result.findings if finding.kind == "doubt"]
    assert ("not known exactly" in str(result)) == (lr is None)


@pytest.mark.parametrize("std", [1.0, 0.5])
def test_pixels_that_were_cut_show_a_wrong_normalization(std: float) -> None:
    """In front of a linear layer, without BatchNorm, whose statistics would show it before."""
    recorded, wrong = update(mlp(), 1), Normalization((0.5,), (std,))
    result = lit_recon.audit(mlp(), recorded, SHAPE, wrong, attacks=CHEAP, minutes=1)
    [doubt] = [finding.text for finding in result.findings if finding.kind == "doubt"]
    assert "were cut to [0, 1]" in doubt


def test_pixels_that_noise_moved_are_not_blamed_on_the_normalization_alone() -> None:
    """Half of the pixels are black, and the normalization is the client's."""
    images, labels = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.zeros(1, dtype=torch.long)
    model = mlp()
    nn.functional.cross_entropy(model((images - 0.5).relu()), labels).backward()
    generator = torch.Generator().manual_seed(1)
    sent = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    size = torch.cat([value.flatten() for value in sent.values()]).square().mean().sqrt()
    noisy = {name: value + size * torch.randn(value.shape, generator=generator) for name, value in sent.items()}
    recorded = Recorder(mlp(), batch_size=1).record(noisy, form="gradient")
    result = lit_recon.audit(mlp(), recorded, SHAPE, attacks=["analytic"], minutes=1)
    [told] = [finding.text for finding in result.findings if "were cut to [0, 1]" in finding.text]
    assert "or noise or missing entries" in told


def test_pixels_of_a_search_at_their_bounds_say_nothing() -> None:
    public = public_model(mlp(), SHAPE, NORMALIZATION)
    recorded = update(mlp(), 1)
    seen = interpret(public, read_evidence(mlp(), recorded), recorded.form, recorded.known).observation(
        public, None, None
    )
    found = Reconstruction(torch.ones(1, *SHAPE), torch.zeros(1, dtype=torch.int64), 0.0)
    outcome = Outcome("geiping2020", "", "", found, distance=0.5, steps=100)
    assert agreement(seen, outcome) is None
    assert agreement(seen, replace(outcome, steps=0)) is not None


def test_the_length_of_a_rough_explanation_says_nothing() -> None:
    public, recorded = public_model(mlp(), SHAPE, NORMALIZATION), update(mlp(), 1)
    seen = interpret(public, read_evidence(mlp(), recorded), recorded.form, recorded.known)
    longer = replace(seen, update={name: 1.5 * value for name, value in seen.update.items()})
    observed = longer.observation(public, None, None)
    outcome = Outcome("analytic", "", "", Reconstruction(images(1), labels(1), 0.0), distance=1e-5)
    told = agreement(observed, outcome)
    assert told is not None
    assert told.kind == "doubt"
    assert agreement(observed, replace(outcome, distance=0.01)) is None


def test_defenses_are_measured_on_the_same_update() -> None:
    result = audited(protection_minutes=1.0)
    assert len(result.protection) == len(DEFENSES)
    noise = [own for own in result.protection if own.title == "Gaussian noise"]
    errors = [own.rmse for own in noise]
    assert None not in errors
    assert errors == sorted(errors)  # type: ignore[type-var]  # none is None
    assert noise[-1].stopped
    assert not noise[0].stopped
    assert errors[0] < 0.05  # type: ignore[operator]  # 0.003 at the time of writing


def test_no_attack_that_applies_is_no_proof() -> None:
    result = lit_recon.audit(convnet(), update(convnet(), 2), SHAPE, NORMALIZATION, attacks=CHEAP, minutes=1)
    assert result.best is None
    assert result.images is None
    assert "fully connected" in result.outcomes[0].reason
    assert not result.outcomes[0].reason.endswith("GradientMatching")  # no advice on which attack to take
    assert "no proof" in verdict(result.metrics())


def test_certified_images_are_believed_first() -> None:
    found = Reconstruction(torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.int64), 0.0)
    near = Outcome("near", "", "", found, distance=1e-6)
    known = Outcome("known", "", "", found, distance=1e-3, certified=1)
    assert best([near, known]) is known
    assert best([near, replace(known, certified=0)]) is near
    assert best([Outcome("none", "", "")]) is None


def test_attacks_after_a_certified_result_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def attempt(candidate: attacks.Candidate, seen: object, seconds: float) -> Outcome:
        tried.append(candidate.name)
        found = Reconstruction(images(1), torch.zeros(1, dtype=torch.int64), 0.0, certified=torch.tensor([True]))
        return Outcome(*candidate[:3], found, certified=1, distance=0.0)

    monkeypatch.setattr(attacks, "attempt", attempt)
    result = audited(attacks=())
    assert tried == ["analytic"]
    assert {one.reason for one in result.outcomes[1:]} == {"not needed: all images are certified"}


def test_a_killed_audit_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = update(mlp(), 1)
    first = audited(recorded=recorded, folder=tmp_path)
    monkeypatch.setattr(attacks, "attempt", None)  # nothing is computed again
    again = audited(recorded=recorded, folder=tmp_path)
    assert first.images is not None
    assert again.images is not None
    assert torch.equal(first.images, again.images)
    assert read_outcome(tmp_path / "analytic.safetensors").distance == first.outcomes[0].distance


def test_gradient_inversion_keeps_to_its_time() -> None:
    result = lit_recon.audit(
        convnet(), update(convnet(), 1), SHAPE, NORMALIZATION, attacks=["geiping2020"], minutes=0.05
    )
    [outcome] = result.outcomes
    assert outcome.found is not None
    assert 0 < outcome.steps < CANDIDATES[-1].most
    assert outcome.seconds < 30  # three seconds are given; ten times as much for a slow machine


def test_a_run_folder_has_report_and_figures(tmp_path: Path) -> None:
    report = audited(protection_minutes=0.5).save(tmp_path / "run")
    text = report.read_text(encoding="utf-8")
    assert "Analytic inversion" in text
    assert "EDPB Opinion 28/2024" in text
    assert (report.parent / "figures" / "images.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((report.parent / "audit.json").read_text(encoding="utf-8"))
    assert {"findings", "attacks", "protection"} == content.keys()
    metrics = json.loads((report.parent / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["attack"] == "analytic"
    report.unlink()
    assert attack(["report", str(report.parent)]) == 0
    assert report.read_text(encoding="utf-8") == text
    with pytest.raises(Exception, match="holds a finished run"):
        audited().save(tmp_path / "run")


def _scored(mean: float, worst: float | None = None) -> dict[str, Scalar]:
    """Scores of an audit; None: of an earlier release, without that of the worst image."""
    scores: dict[str, Scalar] = {"rmse": mean, "baseline_mean_color_rmse": 0.2}
    return scores if worst is None else {**scores, "rmse_worst": worst}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"n_certified": 4, "attack": "x"}, "All 4 images of this update came back"),
        ({"n_certified": 4, "attack": "x", **_scored(0.01, 0.04)}, "All 4 images of this update came back"),
        ({"n_certified": 4, "attack": "x", **_scored(0.08, 0.3)}, "but the largest RMSE from a true image is 0.3"),
        ({"n_certified": 4, "attack": "x", **_scored(0.3)}, "no closer to the true ones"),
        ({"n_certified": 1, "attack": "x", "distance": 0.01}, "1 of 4 images of this update came back certified"),
        ({"n_certified": 0, "attack": "x", "rmse": 0.1, "baseline_mean_color_rmse": 0.2}, "closer to the true ones"),
        ({"n_certified": 0, "attack": "x", "rmse": 0.3, "baseline_mean_color_rmse": 0.2}, "no closer to the true ones"),
        ({"n_certified": 0, "attack": "x", "distance": 0.01}, "it is not known how close they are"),
    ],
)
def test_verdicts_say_what_is_known(metrics: dict[str, Scalar], words: str) -> None:
    assert words in verdict({"n_images": 4, **metrics})


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attacks must be among analytic"):
        AuditSettings(attacks=["magic"])
    with pytest.raises(ConfigError, match="update must be RecordedUpdate or Path or str; got a dict"):
        run.audit(mlp(), {"0.weight": torch.zeros(2)}, (1, 8, 8))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give record, a file"):
        AuditSettings().read()
    with pytest.raises(ConfigError, match="leave before and sent out"):
        AuditSettings(record=tmp_path / "a", before=tmp_path / "b", sent=tmp_path / "c").read()
    for given, told in (([1], r"\(1,\)$"), (torch.eye(10)[:2], r"\(2, 10\): give labels\.argmax\(1\)$")):
        with pytest.raises(ConfigError, match=rf"labels must be \(2,\), the class of each of the 2 images; got {told}"):
            audited(2, labels=given)
    with pytest.raises(ConfigError, match=r"labels must be \(1,\), .* got \(\)$"):
        audited(1, labels=torch.tensor(3))
    with pytest.raises(ShapeError, match="the true images must be"):
        audited(2, replace(update(mlp(), 2), truth={"images": images(3)}))
    with pytest.raises(ShapeError, match="pixels in"):
        audited(2, replace(update(mlp(), 2), truth={"images": 4 * images(2)}))


def test_batches_of_several_sizes_are_refused_before_any_attack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attacks cannot simulate such steps, and each of them would say so after its time."""
    monkeypatch.setattr("lit_recon.experiments.audit.run.run_attacks", lambda *_: pytest.fail("an attack ran"))
    model = mlp()
    with pytest.raises(ConfigError, match="batch_size=5 must be a multiple of batches=2"):
        lit_recon.audit(model, update(model, 5, {"steps": 2, "batches": 2}), SHAPE, NORMALIZATION)
    path = update(model, 5).save(tmp_path / "u.safetensors")
    with pytest.raises(ConfigError, match="batch_size=5 must be a multiple of batches=2"):
        AuditSettings(record=path, steps=2, batches=2).read()


def test_settings_replace_what_a_file_states(tmp_path: Path) -> None:
    path = update(mlp(), 2, {"lr": 0.5}).save(tmp_path / "u.safetensors")
    read = AuditSettings(record=path, lr=0.1).read()
    assert (read.known.lr, read.known.batch_size, read.form) == (0.1, 2, "weights")
    assert read.truth.keys() == {"images", "labels"}


def test_an_audit_replaces_another_where_it_is_told_to(tmp_path: Path) -> None:
    first = audited().save(tmp_path / "run").read_bytes()
    assert (
        audited(recorded=replace(update(mlp(), 1), truth={})).save(tmp_path / "run", overwrite=True).read_bytes()
        != first
    )
