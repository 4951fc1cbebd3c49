"""Defenses of an observed update: measured if there is time, beside what the client itself did to the update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lit_recon
from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import (
    DPSGD,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    MixUp,
    NetworkDropout,
    OptimalGradientPruning,
    PerExampleClipping,
)
from lit_recon.experiments.audit import protection, run
from lit_recon.experiments.audit.attacks import Outcome
from lit_recon.experiments.audit.page import _outcome
from lit_recon.experiments.audit.protection import DEFENSES, defend, known_defense, measure_protection
from lit_recon.experiments.audit.score import AuditResult
from lit_recon.models import public_model
from lit_recon.records import Batch, Observation, Reconstruction
from tests.experiments.audit.updates import NORMALIZATION, SHAPE, images, interpreted, labels, mlp, update


def test_a_defense_that_was_never_attacked_stopped_nothing() -> None:
    result = lit_recon.audit(
        *(mlp(), update(mlp(), 1), SHAPE, NORMALIZATION),
        attacks=["analytic"],
        minutes=1,
        protection_minutes=1e-12,
    )
    assert [own.stopped for own in result.protection] == [None] * len(DEFENSES)
    [reason] = {own.reason for own in result.protection}
    assert reason == "no time was left for Analytic inversion: raise protection_minutes"
    assert "stopped" not in str(result)


def outcome(name: str, shown: str) -> Outcome:
    """An attack that brought the images, black ones, or nothing for one of three reasons."""
    if shown in ("late", "broken", "failed"):
        reason = {"late": "no time was left: raise minutes", "broken": "not enough memory"}.get(shown, shown)
        return Outcome(name, name, "", reason=reason, cut=shown != "failed")
    found = images(1) if shown == "images" else torch.zeros(1, *SHAPE)
    return Outcome(name, name, "", Reconstruction(found, labels(1), 0.0), distance=0.0)


def seen(unsent: str = "", defense: Defense | None = None, kept: GradientDropout | None = None) -> Observation:
    """A client's update of one image without some tensors, and perhaps without dropped entries."""
    recorded = update(mlp(), 1)
    sent = {name: value - recorded.before[name] for name, value in recorded.sent.items() if name != unsent}
    if kept is not None:
        sent = kept.transform_update(sent, None, torch.Generator().manual_seed(0))  # type: ignore[arg-type]  # unused
    recorded = replace(recorded, sent={name: recorded.before[name] + value for name, value in sent.items()})
    found = interpreted(mlp(), recorded)
    return found.observation(public_model(mlp(), SHAPE, NORMALIZATION), None, known_defense(found, defense))


@pytest.mark.parametrize(
    ("shown", "stopped", "words"),
    [
        (("images", "late"), False, "not stopped"),
        (("black", "late"), None, "not measured"),
        (("black", "failed"), True, "stopped"),
        (("failed", "late"), None, "not measured"),
        (("failed", "failed"), True, "stopped"),
    ],
    ids=str,
)
def test_an_attack_without_time_leaves_open_what_no_other_one_decides(
    shown: tuple[str, ...], stopped: bool | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "run_attacks", lambda *_: [outcome(str(i), one) for i, one in enumerate(shown)])
    lines: list[str] = []
    how = (images(1), labels(1), ["analytic"], 1.0)
    [own] = measure_protection(seen(), *how, defenses=DEFENSES[:1], progress=lines.append)
    assert own.stopped is stopped
    assert ("no time was left for 1" in own.reason) == (stopped is None)
    assert ("no time was left for 1" in str(AuditResult([], [], [own], 1))) == (stopped is None)
    assert _outcome({"stopped": own.stopped, "certified": 0}) == words
    assert ("not measured" in lines[0]) == (stopped is None)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (("black", "broken"), "1: not enough memory"),
        (("late", "broken"), "no time was left for 0: raise protection_minutes; 1: not enough memory"),
        (("failed", "broken"), "1: not enough memory"),
    ],
    ids=str,
)
def test_a_defense_that_an_attack_without_memory_was_not_tried_on_stopped_nothing(
    shown: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "run_attacks", lambda *_: [outcome(str(i), one) for i, one in enumerate(shown)])
    how = (images(1), labels(1), ["analytic"], 1.0)
    [own] = measure_protection(seen(), *how, defenses=DEFENSES[:1], progress=lambda line: None)
    assert (own.stopped, own.reason) == (None, reason)


@pytest.mark.parametrize("cut", [False, True])
def test_a_defense_that_stopped_attacks_without_time_for_all_iterations_says_so(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "run_attacks", lambda *_: [replace(outcome("1", "black"), cut=cut)])
    lines: list[str] = []
    how = (images(1), labels(1), ["geiping2020"], 1.0)
    [own] = measure_protection(seen(), *how, defenses=DEFENSES[:1], progress=lines.append)
    assert own.stopped
    shown = _outcome({"stopped": own.stopped, "cut": own.cut, "certified": 0})
    assert all(
        ("in the time there was" in told) is cut for told in (lines[0], str(AuditResult([], [], [own], 1)), shown)
    )


@pytest.mark.parametrize("reason", ["late", "not needed: all images are certified"])
def test_attacks_that_were_not_tried_are_tried_behind_defenses(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    undefended = [outcome("geiping2020", "images"), outcome("features", "failed"), outcome("analytic", "late")]
    undefended[2] = replace(undefended[2], reason=reason, cut=reason == "late")
    monkeypatch.setattr(run, "run_attacks", lambda *_: undefended)
    tried: list[list[str]] = []
    monkeypatch.setattr(run, "measure_protection", lambda *how, **_: tried.append(how[3]) or [])
    lit_recon.audit(mlp(), update(mlp(), 1), SHAPE, NORMALIZATION, protection_minutes=1.0)
    assert tried == [["geiping2020", "analytic"]]


CLIPPED = [GradientClipping(10.0), PerExampleClipping(10.0)]


class Flipped(Defense):
    """Turns images around."""

    def transform_batch(self, batch: Batch, model: nn.Module, generator: torch.Generator) -> Batch:
        return batch._replace(images=batch.images.flip(3))


#: They change no gradient, and so add no noise to one.
OF_BATCH = [NetworkDropout(0.5, ["3"]), MixUp(1.0), Flipped()]


@pytest.mark.parametrize("kept", [None, GradientDropout(0.5)], ids=str)
@pytest.mark.parametrize("own", [*CLIPPED, *OF_BATCH, Chain([OF_BATCH[0], CLIPPED[1]])], ids=str)
def test_what_was_not_sent_is_unknown_beside_a_defense_of_the_client(
    own: Defense, kept: GradientDropout | None
) -> None:
    """True images explain the update; else to a cosine distance of 0.1 and more."""
    assert update_distance(seen("3.weight", own, kept), images(1), labels(1)) < 1e-5


def test_attacks_of_an_audit_know_both(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked: list[Observation] = []
    monkeypatch.setattr(run, "run_attacks", lambda seen, *_: attacked.append(seen) or [])
    recorded = update(mlp(), 1)
    recorded = replace(recorded, sent={name: value for name, value in recorded.sent.items() if name != "3.weight"})
    lit_recon.audit(mlp(), recorded, SHAPE, NORMALIZATION, defense=GradientClipping(10.0))
    assert update_distance(attacked[0], images(1), labels(1)) < 1e-5


def test_a_density_is_known_behind_noise_where_tensors_were_not_sent() -> None:
    own = seen("3.weight", GaussianNoise(0.01)).defense
    assert isinstance(own, Chain)
    assert [type(one) for one in own.defenses] == [ExcludedVariables, GaussianNoise]
    assert own.released_noise(1) == GaussianNoise(0.01).released_noise(1)
    dpsgd = DPSGD(1.0, 0.1)
    assert seen("3.weight", dpsgd).defense is dpsgd


CLIENTS = {
    "a tensor kept": lambda: seen("3.weight"),
    "a tensor kept, and clipping": lambda: seen("3.weight", GradientClipping(0.1)),
    "entries dropped": lambda: seen(kept=GradientDropout(0.5)),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("defense", [GaussianNoise(0.01, True), GradientPruning(0.5)], ids=str)
def test_what_was_not_sent_stays_unknown_behind_a_defense(client: str, defense: Defense) -> None:
    """True images explain the defended update up to the noise, `0.01**2 / 2` of the cosine; else to 0.1 and more."""
    before = CLIENTS[client]()
    after = defend(before, defense, images(1), labels(1))
    assert update_distance(after, images(1), labels(1)) < 2e-4
    assert all(not after.update[name].any() for name, value in before.update.items() if not value.any())


@pytest.mark.parametrize("defense", [one.defense for one in DEFENSES], ids=str)
def test_strengths_are_those_of_what_was_sent(defense: Defense) -> None:
    """As if there were no other tensors."""
    before = seen("3.weight", GradientClipping(10.0))
    after = defend(before, defense, images(1), labels(1)).update
    sent = {name: value for name, value in before.update.items() if name != "3.weight"}
    generator = seeded_generator(0, "audit", repr(defense))
    expected = defense.transform_update(sent, None, generator)  # type: ignore[arg-type]  # not used
    assert not after["3.weight"].any()
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value)


def test_a_defense_that_needs_the_gradient_has_that_of_what_was_sent() -> None:
    after = defend(seen("3.weight", GradientClipping(10.0)), OptimalGradientPruning(0.5), images(1), labels(1)).update
    kept = sum(int((value != 0).sum()) for value in after.values())
    assert kept <= sum(value.numel() for name, value in after.items() if name != "3.weight") / 2


def test_the_attacker_knows_the_defense_of_the_client_too() -> None:
    own, measured = GradientClipping(0.1), GradientPruning(0.5)
    clipped = defend(seen(defense=own), measured, images(1), labels(1)).defense
    assert isinstance(clipped, Chain)
    assert clipped.defenses == [own, measured]
    kept = defend(seen("3.weight", own), measured, images(1), labels(1)).defense
    assert isinstance(kept, Chain)
    assert [type(one) for one in kept.defenses] == [Chain, ExcludedVariables, GradientPruning]
    assert [type(one) for one in kept.defenses[0].defenses] == [ExcludedVariables, GradientClipping]  # type: ignore[attr-defined]  # a Chain
    assert defend(seen(), measured, images(1), labels(1)).defense is measured


@pytest.mark.parametrize(
    ("shown", "certified", "truth", "measured", "words"),
    [
        ("images", 0, True, True, "stopped"),
        ("black", 0, True, False, ""),
        ("black", 1, True, True, "stopped"),
        ("black", 0, False, True, "changed what came back"),
        ("black", 1, False, True, "stopped"),
    ],
)
def test_nothing_is_stopped_where_nothing_had_come_back(
    shown: str, certified: int, truth: bool, measured: bool, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Black images are no closer to the true ones than plain ones, and without those they might be anything."""
    monkeypatch.setattr(run, "run_attacks", lambda *_: [replace(outcome("analytic", shown), certified=certified)])
    # behind every defense nothing comes back
    monkeypatch.setattr(protection, "run_attacks", lambda *_: [outcome("analytic", "failed")])
    recorded = update(mlp(), 1)
    result = lit_recon.audit(
        *(mlp(), recorded if truth else replace(recorded, truth={}), SHAPE, NORMALIZATION), protection_minutes=1.0
    )
    assert bool(result.protection) is measured
    assert any("there was nothing to stop" in one.text for one in result.findings) is not measured
    assert {_outcome(one) for one in result._content()["protection"]} == ({words} if measured else set())
    text = result.save(tmp_path / "run").read_text(encoding="utf-8")
    assert ("Which defense would have changed what came back?" in text) is (words == "changed what came back")


def test_true_images_without_labels_have_those_that_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = update(mlp(), 2)
    came = Outcome("analytic", "", "", Reconstruction(images(2).flip(0), labels(2).flip(0), 0.0), distance=0.0)
    monkeypatch.setattr(run, "run_attacks", lambda *_: [came])
    given: list[Tensor] = []
    monkeypatch.setattr(run, "measure_protection", lambda seen, *pair, **_: given.extend(pair[:2]) or [])
    lit_recon.audit(mlp(), replace(recorded, truth={"images": images(2)}), SHAPE, NORMALIZATION, protection_minutes=1.0)
    assert torch.equal(given[0], images(2))
    assert torch.equal(given[1], labels(2))


@pytest.mark.parametrize("certified", [1, 2])
def test_only_certificates_of_all_images_show_what_a_defense_stopped(
    certified: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others might be anything, and the error is that of all."""
    found = Reconstruction(images(2), labels(2), 0.0)
    came = Outcome("analytic", "", "", found, distance=0.0, certified=certified)
    monkeypatch.setattr(run, "run_attacks", lambda *_: [came])
    monkeypatch.setattr(protection, "run_attacks", lambda *_: [outcome("analytic", "failed")])
    recorded = replace(update(mlp(), 2), truth={})
    result = lit_recon.audit(mlp(), recorded, SHAPE, NORMALIZATION, protection_minutes=1.0)
    assert {own.known for own in result.protection} == {certified == 2}
