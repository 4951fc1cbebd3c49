"""Records of NVFlare's clients: its own filter chains around a task, as its client runner calls them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lit_recon.clients.adapters import nvflare as adapter
from lit_recon.clients.record import RecordedUpdate
from lit_recon.defenses import Defense, ExcludedVariables, PercentilePrivacy, SVTPrivacy
from lit_recon.errors import ConfigError, ShapeError

LR = 0.1
needs_nvflare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs lit_recon[nvflare]")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(4, 3, 8, 8, generator=generator), torch.arange(4)


def arrays(state: dict[str, torch.Tensor], kind: str = "numpy") -> dict[str, Any]:
    return {name: value.clone().numpy() if kind == "numpy" else value.clone() for name, value in state.items()}


def trained(start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """After one step of SGD."""
    model = network()
    model.load_state_dict(start)
    images, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


class Task:
    """The filters of a site around one task of one client."""

    def __init__(
        self, folder: Path, site: str = "site-1", data: bool = True, before: Any = (), behind: bool = True, **known: Any
    ) -> None:
        from nvflare.apis.fl_constant import FilterKey, FLContextKey
        from nvflare.apis.fl_context import FLContextManager
        from nvflare.private.privacy_manager import Scope

        scope = Scope()
        if data:
            scope.add_task_data_filter(adapter.RecordingFilter(str(folder), known), FilterKey.IN)
        recording = adapter.RecordingFilter(str(folder), known)
        for one in [*before, recording] if behind else [recording, *before]:
            scope.add_task_result_filter(one, FilterKey.OUT)
        self.context = FLContextManager(identity_name=site, job_id="job").new_context()
        self.context.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)

    def receive(self, content: Any, number: int | None = 3) -> Any:
        if number is not None:
            content.set_header("current_round", number)
        return self._filtered("task_data_filters", content, "in")

    def send(self, content: Any) -> Any:
        return self._filtered("task_result_filters", content, "out")

    def _filtered(self, filters: str, content: Any, direction: str) -> Any:
        from nvflare.apis.utils.task_utils import apply_filters

        return apply_filters(filters, content, self.context, {}, "train", direction)


def shareable(kind: str, data: dict[str, Any], meta: dict[str, Any] | None = None) -> Any:
    from nvflare.apis.dxo import DXO

    return DXO(kind, data, meta).to_shareable()


def difference(kind: str) -> dict[str, Any]:
    """As NVFlare computes it: weights after minus before."""
    before, after = network().state_dict(), trained(network().state_dict())
    return arrays({name: after[name] - before[name] for name in before}, kind)


@needs_nvflare
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_weights_are_recorded(tmp_path: Path, kind: str) -> None:
    start, after = network().state_dict(), trained(network().state_dict())
    task = Task(tmp_path, batch_size=4, lr=LR)
    task.receive(shareable("WEIGHTS", arrays(start, kind)))
    task.send(shareable("WEIGHTS", arrays(after, kind)))
    assert [path.name for path in tmp_path.iterdir()] == ["site-1-round3.safetensors"]
    update = RecordedUpdate.load(tmp_path / "site-1-round3.safetensors")
    torch.testing.assert_close(dict(update.before), dict(start), rtol=0, atol=0)
    torch.testing.assert_close(dict(update.sent), dict(after), rtol=0, atol=0)
    assert (update.form, update.known.batch_size, update.known.lr) == ("weights", 4, LR)


@needs_nvflare
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_differences_are_recorded_as_the_step_against_the_gradient(tmp_path: Path, kind: str) -> None:
    start = network().state_dict()
    task = Task(tmp_path)
    task.receive(shareable("WEIGHTS", arrays(start, kind)))
    task.send(shareable("WEIGHT_DIFF", difference(kind)))
    update = RecordedUpdate.load(tmp_path / "site-1-round3.safetensors")
    model = network()
    images, labels = batch()
    nn.functional.cross_entropy(model(images), labels).backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(update.sent[name] / LR, value.grad, rtol=0, atol=1e-6)
    assert update.form == "difference"


@needs_nvflare
@pytest.mark.parametrize("kind", ["WEIGHTS", "WEIGHT_DIFF"])
def test_data_pass_through_unchanged(tmp_path: Path, kind: str) -> None:
    task = Task(tmp_path)
    for pass_on, which in ((task.receive, "WEIGHTS"), (task.send, kind)):
        data = difference("numpy")
        given = shareable(which, data, {"NUM_STEPS_CURRENT_ROUND": 1})
        expected = {name: value.copy() for name, value in data.items()}
        got = pass_on(given)["DXO"]
        assert (got["kind"], got["meta"], got["data"] is data) == (which, {"NUM_STEPS_CURRENT_ROUND": 1}, True)
        assert all(np.array_equal(data[name], expected[name]) for name in expected)


@needs_nvflare
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_the_client_received_is_copied(tmp_path: Path, kind: str) -> None:
    task, data = Task(tmp_path), arrays(network().state_dict(), kind)
    task.receive(shareable("WEIGHTS", data))
    for value in data.values():  # a client may train in place
        value += 1
    task.send(shareable("WEIGHTS", data))
    update = RecordedUpdate.load(tmp_path / "site-1-round3.safetensors")
    assert all(torch.equal(update.before[name], value) for name, value in network().state_dict().items())


@needs_nvflare
def test_sites_have_files_of_their_own_and_rounds_without_a_number_are_counted(tmp_path: Path) -> None:
    for site, number in (("site-1", 0), ("site-2", 0), ("site-2", None), ("site-2", None)):
        task = Task(tmp_path, site)
        task.receive(shareable("WEIGHTS", {"w": np.ones(2)}), number)
        task.send(shareable("WEIGHTS", {"w": np.zeros(2)}))
    names = ["site-1-round0", "site-2-round0", "site-2-round1", "site-2-round2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.safetensors" for name in names]


@needs_nvflare
def test_other_results_are_not_recorded(tmp_path: Path) -> None:
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.shareable import make_reply

    task = Task(tmp_path)
    task.receive(shareable("WEIGHTS", {"w": np.ones(2)}))
    task.send(shareable("METRICS", {"accuracy": 0.5}))
    task.send(make_reply(ReturnCode.EXECUTION_EXCEPTION))
    assert not list(tmp_path.iterdir())


def filtered(the_filter: Any, data: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    """What a filter of NVFlare makes of weight differences after `steps` local steps."""
    from nvflare.apis.fl_context import FLContext

    given = {name: value.copy() for name, value in data.items()}
    content = shareable("WEIGHT_DIFF", given, {"NUM_STEPS_CURRENT_ROUND": steps})
    return the_filter.process(content, FLContext())["DXO"]["data"]


def parameters_only() -> dict[str, Any]:
    """Differences as the update of a client has them, and one without dimensions."""
    chosen = {name: value for name, value in difference("numpy").items() if name in dict(network().named_parameters())}
    return {name: value.astype(np.float64) for name, value in chosen.items()} | {"temperature": np.array(0.5)}


def defended(defense: Defense, data: dict[str, Any], lr: float, seed: int = 0) -> dict[str, Any]:
    """The same by a defense of the gradient that moves the weights so."""
    update = {name: torch.as_tensor(-value / lr) for name, value in data.items()}
    released = defense.transform_update(update, None, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
    return {name: -lr * value.numpy() for name, value in released.items()}


@needs_nvflare
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("percentile", "gamma"), [(10, 0.01), (0, 1e-3), (73.5, 1e-3), (90, 1e-4), (100, 0.01)])
def test_percentile_privacy_is_the_defense(percentile: float, gamma: float, steps: int) -> None:
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy as Theirs

    data = parameters_only()
    expected = filtered(Theirs(percentile, gamma), data, steps)
    # a difference after several steps, released as such, is of weights per step by 1 / steps
    got = defended(PercentilePrivacy(percentile, gamma, lr=1 / steps), data, 1.0)
    gradient = defended(PercentilePrivacy(percentile, gamma, lr=LR / steps), data, LR)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12, atol=0)
        np.testing.assert_allclose(gradient[name], value, rtol=1e-12, atol=0)
    entries = np.concatenate([value.ravel() for value in expected.values()])
    assert np.count_nonzero(entries) < (1.01 - percentile / 100) * entries.size
    assert bool((np.abs(entries) == gamma * steps).any()) == (percentile < 100 or gamma < 0.01)


@needs_nvflare
@pytest.mark.parametrize("replace", [True, False])
def test_svt_privacy_is_the_defense_in_law(replace: bool) -> None:
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy as Theirs

    data, draws = {"a": np.array([[0.9, -0.1, 0.4]]), "b": np.array([-0.7, 0.2, 3.0, -1.5, 0.05])}, 800
    settings = {"fraction": 0.4, "epsilon": 30.0, "noise_var": 2.0, "gamma": 1.0, "tau": 0.7, "replace": replace}
    np.random.seed(0)  # noqa: NPY002  NVFlare draws from the global generator
    theirs = [filtered(Theirs(**settings), data, steps=2) for _ in range(draws)]
    ours = [defended(SVTPrivacy(**settings, lr=LR / 2), data, LR, seed) for seed in range(draws)]
    first, second = (np.array([np.concatenate([d["a"].ravel(), d["b"]]) for d in all_]) for all_ in (theirs, ours))
    rate = ((first != 0).mean(0) + (second != 0).mean(0)) / 2
    spread = np.sqrt(2 * rate * (1 - rate) / draws)
    assert (np.abs((first != 0).mean(0) - (second != 0).mean(0)) <= 4.5 * spread).all()
    assert rate.max() > 1.3 * rate.min()
    clipped = 2 * np.clip(np.concatenate([data["a"].ravel(), data["b"]]) / 2, -1, 1)
    noise = [np.abs(seen - clipped)[seen != 0] for seen in (first, second)]
    assert [float(one.mean()) for one in noise] == pytest.approx([2.0, 2.0], rel=0.1)  # 2 gamma / noise_var, 2 steps


@needs_nvflare
@pytest.mark.parametrize("names", [["0.weight", "4.bias"], "weight$", "^4", [], "", None])
def test_excluded_variables_are_those_of_nvflare(names: Any) -> None:
    from nvflare.app_common.filters.exclude_vars import ExcludeVars

    data = parameters_only()
    left = filtered(ExcludeVars(names), data)
    for name, value in defended(ExcludedVariables(names), data, LR).items():
        np.testing.assert_allclose(value, left.get(name, np.zeros_like(value)), rtol=1e-12, atol=0)


@needs_nvflare
@pytest.mark.parametrize("behind", [True, False])
def test_what_leaves_after_the_filters_of_nvflare_is_recorded_behind_them(tmp_path: Path, behind: bool) -> None:
    from nvflare.app_common.filters.exclude_vars import ExcludeVars
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy as Percentile

    start, data = network().state_dict(), difference("numpy")
    task = Task(tmp_path, before=[Percentile(90, 1e-3), ExcludeVars("^4")], behind=behind)
    task.receive(shareable("WEIGHTS", arrays(start)))
    given = {name: value.copy() for name, value in data.items()}
    left = task.send(shareable("WEIGHT_DIFF", given))["DXO"]["data"]
    assert sorted(left) == [name for name in sorted(data) if not name.startswith("4")]
    update = RecordedUpdate.load(tmp_path / "site-1-round3.safetensors")
    expected = left if behind else data
    assert sorted(update.sent) == sorted(expected)
    for name, value in update.sent.items():
        np.testing.assert_array_equal(-value.numpy(), expected[name])
    assert bool((update.sent["0.weight"] == 0).any()) is behind


@needs_nvflare
def test_tasks_that_cannot_be_recorded_are_refused(tmp_path: Path) -> None:
    weights = {"w": np.ones(2)}
    with pytest.raises(ConfigError, match="got none: add RecordingFilter to task_data_filters too"):
        Task(tmp_path, data=False).send(shareable("WEIGHTS", weights))
    with pytest.raises(ConfigError, match="got differences or several sets"):
        Task(tmp_path).receive(shareable("WEIGHT_DIFF", weights))
    task = Task(tmp_path)
    task.receive(shareable("WEIGHTS", weights))
    with pytest.raises(ConfigError, match="got differences or several sets"):
        task.receive(shareable("WEIGHTS", weights))
    with pytest.raises(ConfigError, match="processed by HE: put RecordingFilter before the filter"):
        task.send(shareable("WEIGHTS", weights, {"PROCESSED_ALGORITHM": "HE"}))
    with pytest.raises(ShapeError, match="w must be an array of numbers; got bytes"):
        task.send(shareable("WEIGHTS", {"w": b"packed"}))
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        Task(tmp_path, batch_size=0)
    assert not list(tmp_path.iterdir())


@needs_nvflare
def test_the_job_api_writes_the_settings_of_the_filter(tmp_path: Path) -> None:
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.defs import FilterType

    job = FedJob("quick")
    job.set_app_packages(["lit_recon"])
    settings = {"folder": "updates", "known": {"batch_size": 4}}
    job.to(adapter.RecordingFilter(**settings), "site-1", tasks=["train"], filter_type=FilterType.TASK_DATA)
    job.export_job(str(tmp_path))
    config = next(tmp_path.rglob("config_fed_client.json")).read_text()
    for text in ("lit_recon.clients.adapters.nvflare.RecordingFilter", '"folder": "updates"', '"batch_size": 4'):
        assert text in config


def test_without_nvflare_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("nvflare.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nvflare", None)
    spec = importlib.util.find_spec(adapter.__name__)
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    with pytest.raises(ConfigError, match=r'needs NVFlare, which is not installed: pip install "lit_recon\[nvflare\]"'):
        bare.RecordingFilter("updates")
