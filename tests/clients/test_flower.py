"""Records of Flower's clients: its own apps and strategies, with a grid that calls the clients in this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_recon.clients.adapters.arrays import named, path_of
from lit_recon.clients.adapters.flower import recording, recording_mod
from lit_recon.clients.record import RecordedUpdate
from lit_recon.errors import ConfigError, ShapeError

# typer, which Flower imports, takes names of click that will move.
pytestmark = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")
NODES = (101, 202)
LR = 0.1
KNOWN = {"batch_size": 32, "lr": LR, "momentum": 0.9}
needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs lit_recon[flower]")


def network() -> nn.Module:
    """The network of Flower's PyTorch quickstart."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def batch(partition: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(partition)
    return torch.rand(32, 3, 32, 32, generator=generator), torch.randint(10, (32,), generator=generator)


def train(model: nn.Module, partition: int) -> None:
    """One local step."""
    images, labels = batch(partition)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def message_app(*mods: Any) -> Any:
    """A client of the message API, whose arrays have names."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=list(mods))

    @app.train()
    def step(message: Message, context: Any) -> Message:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(keep_input=False))
        train(model, context.node_config["partition-id"])
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 32})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 32, "loss": 1.0})}), reply_to=message)

    return app


def numpy_app(*mods: Any) -> Any:
    """A client of the older API, whose arrays have no names."""
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    class Client(NumPyClient):
        def __init__(self, partition: int) -> None:
            self.partition = partition

        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            model, names = network(), list(network().state_dict())
            model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, parameters, strict=True)})
            train(model, self.partition)
            return [value.numpy() for value in model.state_dict().values()], 32, {}

    return ClientApp(lambda context: Client(context.node_config["partition-id"]).to_client(), mods=list(mods))


def grid_of(app: Any, failing: tuple[int, ...] = ()) -> Any:
    """A grid that calls the app of the clients, with messages that went through Flower's serialization."""
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.serverapp import Grid
    from flwr.supercore.run import Run

    class Here(Grid):
        run = Run.create_empty(1)

        def __init__(self) -> None:
            self.contexts = {
                node: Context(1, node, {"partition-id": i}, RecordDict(), {}) for i, node in enumerate(NODES)
            }

        def set_run(self, run: Run) -> None: ...

        def create_message(self, *args: Any, **kwargs: Any) -> Message:
            return Message(*args, **kwargs)

        def get_node_ids(self) -> Iterable[int]:
            return NODES

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            raise NotImplementedError

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            raise NotImplementedError

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            for message in messages:
                node = message.metadata.dst_node_id
                arrived = message_from_proto(message_to_proto(message))
                if node in failing:
                    yield Message(Error(0, "failed on purpose"), reply_to=arrived)
                else:
                    yield message_from_proto(message_to_proto(app(arrived, self.contexts[node])))

    return Here()


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower's own processes set before they call an app."""
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    if importlib.util.find_spec("flwr") is not None:
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_task_id", "_run_id", "_node_id"):
            monkeypatch.setattr(TaskIdentity, name, 1)


def run_messages(folder: Path, app: Callable[..., Any], failing: tuple[int, ...] = (), rounds: int = 2) -> Any:
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    strategy = recording(FedAvg(), folder, **KNOWN)
    return strategy.start(grid_of(app, failing), ArrayRecord(network().state_dict()), num_rounds=rounds)


def run_fits(folder: Path, app: Callable[..., Any], rounds: int = 2) -> None:
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig
    from flwr.server.compat import start_grid
    from flwr.server.strategy import FedAvg

    first = ndarrays_to_parameters([value.numpy() for value in network().state_dict().values()])
    strategy = recording(FedAvg(fraction_evaluate=0, initial_parameters=first), folder, network(), **KNOWN)
    start_grid(grid=grid_of(app), strategy=strategy, config=ServerConfig(num_rounds=rounds))


def check(folder: Path) -> None:
    """The records of two rounds say what the two clients received and computed."""
    updates = {(node, n): RecordedUpdate.load(path_of(folder, f"node{node}", n)) for node in NODES for n in (1, 2)}
    assert len(list(folder.iterdir())) == len(updates)
    for (node, n), update in updates.items():
        model = network()
        start = model.state_dict()
        if n == 2:
            start = {name: sum(updates[other, 1].sent[name] for other in NODES) / 2 for name in start}
        assert set(update.before) == set(start)
        torch.testing.assert_close(dict(update.before), dict(start))
        model.load_state_dict(update.before)
        images, labels = batch(NODES.index(node))
        nn.functional.cross_entropy(model(images), labels).backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close((update.before[name] - update.sent[name]) / LR, value.grad, rtol=0, atol=1e-6)
        assert update.form == "weights"
        assert (update.known.batch_size, update.known.lr, update.known.momentum) == (32, LR, 0.9)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@needs_flower
def test_messages_are_recorded_by_mod_and_by_strategy(tmp_path: Path) -> None:
    client, server = tmp_path / "client", tmp_path / "server"
    run_messages(server, message_app(recording_mod(client, **KNOWN)))
    check(client)
    assert contents(client) == contents(server)


@needs_flower
def test_fits_are_recorded_by_mod_and_by_strategy(tmp_path: Path) -> None:
    client, server = tmp_path / "client", tmp_path / "server"
    run_fits(server, numpy_app(recording_mod(client, list(network().state_dict()), **KNOWN)))
    check(client)
    assert contents(client) == contents(server)


@needs_flower
def test_recording_changes_nothing(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    plain = FedAvg().start(grid_of(message_app()), ArrayRecord(network().state_dict()), num_rounds=2)
    recorded = run_messages(tmp_path / "server", message_app(recording_mod(tmp_path / "client")))
    assert dict(plain.arrays) == dict(recorded.arrays)


@needs_flower
def test_the_first_mod_records_what_leaves_the_client(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord

    def zero(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        reply = call_next(message, context)
        for key, record in reply.content.array_records.items():
            arrays = {name: torch.zeros_like(value) for name, value in record.to_torch_state_dict().items()}
            reply.content[key] = ArrayRecord(arrays)
        return reply

    run_messages(tmp_path / "server", message_app(recording_mod(tmp_path / "outer"), zero), rounds=1)
    run_messages(tmp_path / "server", message_app(zero, recording_mod(tmp_path / "inner")), rounds=1)
    outer, inner = (RecordedUpdate.load(path_of(tmp_path / name, "node101", 1)) for name in ("outer", "inner"))
    assert not any(value.any() for value in outer.sent.values())
    assert all(value.any() for value in inner.sent.values())


@needs_flower
def test_failed_clients_leave_no_record(tmp_path: Path) -> None:
    run_messages(tmp_path, message_app(), failing=(NODES[0],), rounds=1)
    assert [path.name for path in tmp_path.iterdir()] == ["node202-round1.safetensors"]


@needs_flower
def test_replies_that_are_errors_are_passed_on(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord, Error, Message, RecordDict

    message = Message(RecordDict({"arrays": ArrayRecord(network().state_dict())}), 101, "train")
    reply = Message(Error(0, "failed on purpose"), reply_to=message)
    assert recording_mod(tmp_path)(message, None, lambda message, context: reply) is reply
    assert not list(tmp_path.iterdir())


def answer(folder: Path, kind: str = "train", group: str = "", sent: dict[str, Any] | None = None, **more: Any) -> None:
    """Two messages, which the client sends back as they came."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict

    arrays = {"arrays": ArrayRecord({"w": torch.ones(2)})} if sent is None else sent
    mod = recording_mod(folder, **more)
    for _ in range(2):
        message = Message(RecordDict(arrays), 101, kind, group_id=group)
        mod(message, Context(1, 101, {}, RecordDict(), {}), lambda got, context: Message(got.content, reply_to=got))


@needs_flower
def test_rounds_have_the_number_that_the_server_sends_or_are_counted(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord, ConfigRecord

    told = {"arrays": ArrayRecord({"w": torch.ones(2)}), "config": ConfigRecord({"server-round": 7})}
    answer(tmp_path / "told", sent=told)
    answer(tmp_path / "group", group="5")
    answer(tmp_path / "counted")
    assert list(contents(tmp_path / "told")) == ["node101-round7.safetensors"]
    assert list(contents(tmp_path / "group")) == ["node101-round5.safetensors"]
    assert sorted(contents(tmp_path / "counted")) == ["node101-round1.safetensors", "node101-round2.safetensors"]


@needs_flower
def test_nodes_may_be_sent_different_weights(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.serverapp.strategy import FedAvg

    class Personal(FedAvg):
        def configure_train(self, *args: Any) -> Iterable[Message]:
            for message in super().configure_train(*args):
                node = message.metadata.dst_node_id
                state = {name: value + node for name, value in network().state_dict().items()}
                content = {**message.content, "arrays": ArrayRecord(state)}
                yield Message(RecordDict(content), node, "train")

    strategy = recording(Personal(fraction_evaluate=0), tmp_path)
    strategy.start(grid_of(message_app()), ArrayRecord(network().state_dict()), num_rounds=1)
    for node in NODES:
        before = RecordedUpdate.load(path_of(tmp_path, f"node{node}", 1)).before["0.bias"]
        torch.testing.assert_close(before, network().state_dict()["0.bias"] + node, rtol=0, atol=0)


@needs_flower
def test_actions_of_training_are_recorded_and_nothing_else(tmp_path: Path) -> None:
    for kind, recorded in (("query", 0), ("evaluate", 0), ("train.personal", 1)):
        answer(tmp_path, kind=kind, group="1")
        assert len(contents(tmp_path)) == recorded


@needs_flower
def test_one_of_several_records_is_chosen_by_its_key(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord

    sent = {"model": ArrayRecord({"w": torch.ones(2)}), "control": ArrayRecord({"w": torch.zeros(2)})}
    answer(tmp_path, sent=sent, arrays="model")
    assert RecordedUpdate.load(path_of(tmp_path, "node101", 1)).sent["w"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="expected one ArrayRecord .* got 2 .model, control.*arrays="):
        answer(tmp_path, sent=sent)
    with pytest.raises(ConfigError, match="expected an ArrayRecord weights; got model, control"):
        answer(tmp_path, sent=sent, arrays="weights")
    with pytest.raises(ConfigError, match="got 0"):
        answer(tmp_path, sent={})


@needs_flower
def test_a_strategy_must_see_the_whole_round(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.serverapp.strategy import FedAvg

    message = Message(RecordDict({"arrays": ArrayRecord({"w": torch.ones(2)})}), 101, "train")
    with pytest.raises(ConfigError, match="sent it no weights: record the outermost"):
        recording(FedAvg(), tmp_path).aggregate_train(1, [Message(message.content, reply_to=message)])


def test_arrays_without_names_are_named_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    arrays = {str(i): value.numpy() for i, value in enumerate(model.state_dict().values())}
    for names in (model, list(model.state_dict())):
        torch.testing.assert_close(named(arrays, names), dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="7 arrays without names: give names="):
        named(arrays)
    with pytest.raises(ShapeError, match="expected 4 arrays, one for each name, but got 7"):
        named(arrays, [name for name, _ in model.named_parameters()])
    with pytest.raises(ShapeError, match=r"1.weight .* shape \(4,\), but .* \(3,\)"):
        named(arrays, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(4)))
    with pytest.raises(ShapeError, match="w must be an array of numbers; got bytes"):
        named({"w": b"encrypted"})


def test_arrays_are_copied() -> None:
    array = torch.ones(2).numpy()
    copied, tensor = named({"w": array})["w"], torch.ones(2)
    also = named({"w": tensor})["w"]
    array[:], tensor[:] = 0, 0
    assert copied.tolist() == also.tolist() == [1, 1]


def test_what_is_not_a_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a strategy of flwr.serverapp or flwr.server; got str"):
        recording("FedAvg", tmp_path)


def test_impossible_circumstances_are_refused_at_once(tmp_path: Path) -> None:
    for record in (recording_mod, lambda folder, **known: recording("FedAvg", folder, **known)):
        with pytest.raises(ConfigError, match="batch_size must be at least 1"):
            record(tmp_path, batch_size=0)
        with pytest.raises(ConfigError, match="form must be one of gradient, difference, weights; got 'weight'"):
            record(tmp_path, form="weight")


def test_without_flower_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    for name in [name for name in sys.modules if name.startswith("flwr.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r'needs Flower, which is not installed: pip install "lit_recon\[flower\]"'):
        recording_mod(tmp_path)
