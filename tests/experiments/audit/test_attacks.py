"""Outcomes in a folder: of one update, model and knowledge, and only of attacks that had time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import lit_recon
from lit_recon.attacks.base import Attack
from lit_recon.clients.record import RecordedUpdate
from lit_recon.defenses import GradientPruning
from lit_recon.errors import ConfigError
from lit_recon.experiments.audit import attacks
from lit_recon.experiments.audit.attacks import Outcome, read_outcome
from lit_recon.experiments.audit.score import AuditResult
from lit_recon.records import Reconstruction
from tests.experiments.audit.updates import NORMALIZATION, SHAPE, convnet, images, labels, mlp, update


def audited(folder: Path, recorded: RecordedUpdate, **how: object) -> AuditResult:
    chosen = {"attacks": ["analytic"], "minutes": 1.0, "folder": folder, **how}
    return lit_recon.audit(mlp(), recorded, SHAPE, NORMALIZATION, **chosen)  # type: ignore[arg-type]  # of several types


def failing(error: Exception) -> Callable[..., Attack]:
    """In the place of a method that builds attacks."""

    def build(*_: object) -> Attack:
        raise error

    return build


def changed(recorded: RecordedUpdate) -> RecordedUpdate:
    """Half of the same update."""
    sent = {name: (value + recorded.before[name]) / 2 for name, value in recorded.sent.items()}
    return replace(recorded, sent=sent)


def times(logits: Tensor, target: Tensor) -> Tensor:
    return 2 * nn.functional.cross_entropy(logits, target)


OTHERS: dict[str, tuple[Callable[[RecordedUpdate], RecordedUpdate], dict[str, object]]] = {
    "update": (changed, {}),
    "weights": (lambda one: replace(one, before={**one.before, "3.bias": one.before["3.bias"] + 0.01}), {}),
    "rate": (lambda one: replace(one, known=replace(one.known, lr=0.2)), {}),
    "images": (lambda one: replace(one, known=replace(one.known, batch_size=2), truth={}), {}),
    "labels": (lambda one: one, {"labels": labels(1)}),
    "defense": (lambda one: one, {"defense": GradientPruning(0.5)}),
    "loss": (lambda one: one, {"loss": times}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_outcome_of_another_update_is_refused(other: str, tmp_path: Path) -> None:
    recorded = update(mlp(), 1)
    audited(tmp_path, recorded)
    path = tmp_path / "analytic.safetensors"
    before = path.read_bytes()
    change, how = OTHERS[other]
    with pytest.raises(ConfigError, match=r"analytic\.safetensors must be the outcome .* choose another folder, or"):
        audited(tmp_path, change(recorded), **how)
    assert path.read_bytes() == before


def test_an_outcome_of_other_frozen_layers_is_refused(tmp_path: Path) -> None:
    recorded, model = update(mlp(), 1), mlp()
    audited(tmp_path, recorded)
    model[1].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"analytic\.safetensors must be the outcome"):
        lit_recon.audit(model, recorded, SHAPE, NORMALIZATION, attacks=["analytic"], folder=tmp_path)


def strided() -> nn.Module:
    """A convolution with fewer positions than outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 32, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


@pytest.mark.parametrize(
    ("build", "layer", "name"), [(strided, 0, "feature_maps"), (convnet, 3, "layer_inputs"), (convnet, 5, "analytic")]
)
def test_attacks_do_without_the_gradient_of_a_parametrized_weight(
    build: Callable[[], nn.Module], layer: int, name: str
) -> None:
    model = build()
    weight_norm(model.get_submodule(f"{layer}"))
    result = lit_recon.audit(model, update(model, 1), SHAPE, NORMALIZATION, attacks=[name], minutes=0.02)
    assert result.outcomes[0].reason or result.outcomes[0].found


def test_a_defended_outcome_of_another_update_is_refused(tmp_path: Path) -> None:
    """Before any attack runs."""
    recorded = update(mlp(), 1)
    audited(tmp_path, recorded, protection_minutes=1.0)
    (tmp_path / "analytic.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"protection.0.analytic\.safetensors must be the outcome"):
        audited(tmp_path, changed(recorded), protection_minutes=1.0)
    assert not (tmp_path / "analytic.safetensors").exists()


def test_defended_outcomes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = update(mlp(), 1)
    first = audited(tmp_path, recorded, protection_minutes=1.0)
    monkeypatch.setattr(attacks, "attempt", None)  # nothing is computed again
    again = audited(tmp_path, recorded, protection_minutes=1.0)
    assert [own.rmse for own in again.protection] == [own.rmse for own in first.protection]


def test_maps_are_chosen_by_what_they_match_wherever_the_file_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attacks._configured("feature_maps")
    *maps, top_down, matching = whole["init_args"]["attacks"]
    assert top_down["init_args"]["features"]["class_path"] == "TopDownMatching"
    assert "features" not in matching["init_args"]
    turned = {**whole, "init_args": {"attacks": [top_down, matching, *maps]}}
    monkeypatch.setattr(attacks, "read_settings", lambda path: {"attack": turned})
    assert attacks._maps(0)["init_args"]["attacks"] == maps


def test_an_attack_without_time_runs_when_it_has_some(tmp_path: Path) -> None:
    recorded = update(mlp(), 1)
    [late] = audited(tmp_path, recorded, minutes=1e-12).outcomes
    assert late.reason == "no time was left: raise minutes"
    assert not [*tmp_path.iterdir()]
    assert audited(tmp_path, recorded).best is not None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate 2 GiB"),
            "not enough memory (CUDA out of memory):",
        ),
        (MemoryError(), "not enough memory (MemoryError): free some"),
        (
            torch.linalg.LinAlgError("linalg.eigh: no\nconvergence"),  # type: ignore[attr-defined]  # documented
            "linear algebra failed (linalg.eigh: no convergence)",
        ),
    ],
    ids=["gpu", "cpu", "linear algebra"],
)
def test_an_attack_that_the_machine_breaks_off_ends_no_audit_and_runs_again(
    error: Exception, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = update(mlp(), 1)
    with monkeypatch.context() as short:
        short.setattr(attacks.Candidate, "build", failing(error))
        result = audited(tmp_path / "kept", recorded)
    [broken] = result.outcomes
    assert broken.found is None
    assert broken.reason.startswith(told)
    assert told in result.save(tmp_path / "run").read_text(encoding="utf-8")
    assert not [*(tmp_path / "kept").glob("*")]
    assert audited(tmp_path / "kept", recorded).best is not None


def test_a_fault_of_an_attack_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks.Candidate, "build", failing(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        audited(tmp_path, update(mlp(), 1))


def test_an_attack_that_was_cut_short_runs_again_with_more_minutes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, tried = update(mlp(), 1), []

    def attempt(candidate: attacks.Candidate, seen: object, seconds: float) -> Outcome:
        tried.append(candidate.name)
        found = Reconstruction(images(1), torch.zeros(1, dtype=torch.int64), 0.0)
        first = len(tried) == 1
        return Outcome(*candidate[:3], found, distance=0.1 if first else 0.2, cut=first)

    monkeypatch.setattr(attacks, "attempt", attempt)
    for minutes, count in ((1.0, 1), (0.5, 1), (1.0, 1), (2.0, 2), (3.0, 2)):
        audited(tmp_path, recorded, minutes=minutes)
        assert len(tried) == count
    assert read_outcome(tmp_path / "analytic.safetensors").distance == 0.1  # the better one stays


@pytest.mark.parametrize(("minutes", "cut"), [(1e-4, True), (5.0, False)])
def test_attacks_know_whether_they_were_cut_short(minutes: float, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [one._replace(most=60) if one.name == "geiping2020" else one for one in attacks.CANDIDATES]
    monkeypatch.setattr(attacks, "CANDIDATES", short)
    result = lit_recon.audit(mlp(), update(mlp(), 2), SHAPE, NORMALIZATION, attacks=["geiping2020"], minutes=minutes)
    assert [one.cut for one in result.outcomes] == [cut]


def test_a_folder_knows_the_same_update_in_another_process(tmp_path: Path) -> None:
    """The address of a function, in a model's or a loss's text, is another one there."""

    def loss() -> Callable[[Tensor, Tensor], Tensor]:
        def mean(logits: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, target)

        return mean

    recorded, first, second = update(mlp(), 1), loss(), loss()
    assert repr(first) != repr(second)
    audited(tmp_path, recorded, loss=first)
    audited(tmp_path, recorded, loss=second)


@pytest.mark.parametrize(("name", "n"), [("analytic", 1), ("geiping2020", 2)])
def test_attacks_use_labels_that_are_given(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong ones here: recovered ones would be right."""
    few = [one._replace(most=one.most and 60) for one in attacks.CANDIDATES]
    monkeypatch.setattr(attacks, "CANDIDATES", few)
    given = labels(n) + 5
    how = {"attacks": [name], "minutes": 1.0}
    [plain], [told] = (
        lit_recon.audit(mlp(), update(mlp(), n), SHAPE, NORMALIZATION, labels=own, **how).outcomes  # type: ignore[arg-type]  # of several types
        for own in (None, given)
    )
    assert plain.found is not None
    assert told.found is not None
    assert plain.found.labels.sort().values.tolist() == labels(n).tolist()
    assert told.found.labels.sort().values.tolist() == given.tolist()


@pytest.mark.parametrize("label", [-1, 10])
def test_labels_out_of_range_are_refused(label: int) -> None:
    with pytest.raises(ConfigError, match=r"classes from 0 to 9; got \[-?\d+\]"):
        lit_recon.audit(mlp(), update(mlp(), 1), SHAPE, NORMALIZATION, labels=[label])


def test_why_maps_do_not_apply_is_said_of_the_network_s_convolutions() -> None:
    recorded = update(convnet(), 1)
    result = lit_recon.audit(convnet(), recorded, SHAPE, NORMALIZATION, attacks=["feature_maps"], minutes=1.0)
    [own] = result.outcomes
    assert "WideFeatureLayer" not in own.reason
    assert "patches in a batch of 1" in own.reason
