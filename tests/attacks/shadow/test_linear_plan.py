"""What linear response is not for is refused, and its models are never taken for others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from lit_recon.attacks.shadow import (
    ApproximationError,
    GradientDescent,
    LinearPlan,
    LinearResponse,
    Plan,
    PrivateDescent,
    ShadowPlan,
    ShadowStore,
)
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError
from lit_recon.models.released import ReleasedMLP

RESPONSE = LinearResponse(rank=20, sample=4, tolerance=1.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"descent": GradientDescent(optimizer="adam")}, "descent.optimizer=adam"),
        ({"descent": GradientDescent(dp=PrivateDescent(noise_multiplier=1.0))}, "descent.dp=PrivateDescent"),
        ({"descent": GradientDescent(batch_size=4)}, "descent.batch_size=4"),
        ({"descent": GradientDescent(snapshots=[3])}, r"descent.snapshots=\[3\]"),
        ({"initialization": "fresh"}, "initialization=fresh"),
        ({"network": ReleasedMLP((1, 5, 5), 4, [500])}, "lower linear.rank"),
    ],
)
def test_other_trainings_are_refused_before_anything_is_computed(
    plan: ShadowPlan, change: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*exact"):
        LinearPlan(dataclasses.replace(plan, **change), RESPONSE, "linear")  # type: ignore[arg-type]


def test_steps_are_refused_where_they_would_change_nothing(plan: ShadowPlan) -> None:
    with pytest.raises(ConfigError, match="got 11 for a ReleasedMLP: leave linear.steps out"):
        LinearPlan(plan, dataclasses.replace(RESPONSE, steps=11), "linear")


def test_every_way_has_a_store_of_its_own(tmp_path: Path, plan: ShadowPlan) -> None:
    others: list[Plan] = [
        plan,
        LinearPlan(plan, RESPONSE, "mixed"),
        *(
            LinearPlan(plan, dataclasses.replace(RESPONSE, **change), "linear")
            for change in ({"rank": 19}, {"hessian_images": 8}, {"sample": 5}, {"tolerance": 0.5})
        ),
    ]
    linear = LinearPlan(plan, RESPONSE, "linear")
    assert linear.fixed is plan.fixed
    ShadowStore.create(tmp_path, linear.description, "batched_mlp", 3)
    assert ShadowStore.open(tmp_path, linear.description) is not None
    for other in others:
        with pytest.raises(ConfigError, match="another training"):
            ShadowStore.open(tmp_path, other.description)
    with pytest.raises(ConfigError, match="shadows is 'linear' there, None now"):
        ShadowStore.open(tmp_path, plan.description)
    json.dumps(linear.description)


def test_a_sample_needs_its_images(plan: ShadowPlan, shadows: ImageSet) -> None:
    linear = LinearPlan(plan, RESPONSE, "linear")
    assert torch.equal(linear.sample(shadows).images, shadows.images[:4])
    with pytest.raises(ConfigError, match="at most the number of shadow models, 3; got 4"):
        linear.sample(shadows.subset(torch.arange(3)))


def test_nothing_is_used_that_was_not_measured(tmp_path: Path, plan: ShadowPlan, shadows: ImageSet) -> None:
    linear = LinearPlan(plan, RESPONSE, "linear")
    with pytest.raises(MissingDataError, match="exact_sample holds no exact models"):
        linear.measure(tmp_path, shadows)
    store = ShadowStore.create(tmp_path, linear.description, "batched_mlp", 3)
    with pytest.raises(MissingDataError, match="measure the error of linear response"):
        next(linear.train_shards(store, [0], shadows))
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_median_decides_and_is_told(tmp_path: Path, plan: ShadowPlan) -> None:
    strict = dataclasses.replace(RESPONSE, tolerance=0.25)
    linear, mixed = LinearPlan(plan, strict, "linear"), LinearPlan(plan, strict, "mixed")
    ApproximationError([0.1, 0.2, 0.3, 0.9], 0.25).write(tmp_path)
    assert linear.trusted(tmp_path)
    assert linear.facts(tmp_path, 10) == {
        "shadows": "linear",
        "n_linear": 10,
        "linear_error": pytest.approx(0.25),
        "linear_error_max": 0.9,
        "linear_error_n": 4,
        "linear_tolerance": 0.25,
    }
    assert linear.notes(tmp_path, 10)[0] == (
        "10 of the 10 shadow models were made by linear response: on 4 models trained exactly, the approximation has a "
        "median relative error of 0.250 and at most 0.900, where a median of 0.25 is tolerated."
    )
    assert mixed.facts(tmp_path, 10)["n_linear"] == 6
    ApproximationError([0.1, 0.2, 0.4, 0.9], 0.25).write(tmp_path)
    with pytest.raises(ConfigError, match="median relative error of 0.300 .* raise linear.rank .* mixed or exact"):
        linear.trusted(tmp_path)
    assert not mixed.trusted(tmp_path)
    assert mixed.facts(tmp_path, 10)["n_linear"] == 0
    assert mixed.notes(tmp_path, 10)[0].startswith("All 10 shadow models were trained exactly: on 4 models")


@pytest.mark.parametrize("content", ["", "{}", '{"errors": ["x"]}', '{"errors": 3}', '{"errors": [0.1, 0.2]}'])
def test_a_damaged_measurement_is_named(tmp_path: Path, plan: ShadowPlan, content: str) -> None:
    ApproximationError.path(tmp_path).write_text(content)
    with pytest.raises(CorruptFileError, match="linear_response.json .*delete it, and .* measured again"):
        LinearPlan(plan, RESPONSE, "linear").measured(tmp_path)
