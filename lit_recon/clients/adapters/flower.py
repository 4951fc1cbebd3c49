"""Flower: a client mod and a change to any strategy that record the updates of clients.

On the client, first in the list, so that it sees what the other mods return:

    app = ClientApp(mods=[recording_mod("updates", batch_size=32, lr=0.1)])

On the server:

    strategy = recording(FedAvg(), "updates")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lit_recon.clients.adapters.arrays import Names, missing, named, path_of
from lit_recon.clients.record import Circumstances, RecordedUpdate, Sent, require_form
from lit_recon.errors import ConfigError

_Strategy = TypeVar("_Strategy")
_Arrays = dict[str, Tensor]


def recording_mod(
    folder: Path | str, names: Names = None, *, form: Sent = "weights", arrays: str | None = None, **known: Any
) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """A client mod that writes `node<ID>-round<N>.safetensors` for each training message that the client answers.

    Args:
        folder: for the files; a file of the same name is replaced.
        names: for arrays without names, which a NumPyClient sends: the model, or names in the order of the arrays.
        form: what the client returns.
        arrays: key of the ArrayRecord with the weights, where messages hold several.
        **known: see `Circumstances`.

    Raises:
        ConfigError: without Flower, or for an impossible `form` or circumstance; the mod itself, for messages whose
            weights cannot be found or named.
    """
    files = _Files(folder, names, form, arrays, Circumstances(**known))
    train = _flower("flwr.app").MessageType.TRAIN

    def record(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        if message.metadata.message_type.partition(".")[0] != train:
            return call_next(message, context)
        number = _round(message)
        before = files.read(message.content)  # at once: the client may take the arrays out
        reply = call_next(message, context)
        if not reply.has_error():
            files.save(context.node_id, number, before, reply.content)
        return reply

    return record


def recording(
    strategy: _Strategy,
    folder: Path | str,
    names: Names = None,
    *,
    form: Sent = "weights",
    arrays: str | None = None,
    **known: Any,
) -> _Strategy:
    """Let a strategy write a file for each client and round, before it aggregates; returns the same object.

    Both kinds of strategy are taken, of `flwr.serverapp` and of `flwr.server`. Around a strategy that wraps another,
    as those for differential privacy do, this belongs outermost. Files and arguments are those of `recording_mod`; a
    mod in the same simulation needs another folder.
    """
    files = _Files(folder, names, form, arrays, Circumstances(**known))
    if hasattr(strategy, "configure_train"):
        _record_messages(strategy, files)
    elif hasattr(strategy, "configure_fit"):
        _flower("flwr.common")
        _record_fits(strategy, files)
    else:
        raise ConfigError(
            f"expected a strategy of flwr.serverapp or flwr.server; got {type(strategy).__name__}: give one of them"
        )
    return strategy


def _record_messages(strategy: Any, files: _Files) -> None:
    # Methods of the object are replaced, not wrapped by another class: `start` of the strategy calls them.
    configure, aggregate = strategy.configure_train, strategy.aggregate_train
    received: dict[int | str, _Arrays] = {}

    def configure_train(server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        messages = list(configure(server_round, arrays, config, grid))
        received.update(files.read_all((message.metadata.dst_node_id, message.content) for message in messages))
        return messages

    def aggregate_train(server_round: int, replies: Iterable[Any]) -> Any:
        replies = list(replies)
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error():
                files.save(node, server_round, received.get(node), reply.content)
        received.clear()
        return aggregate(server_round, replies)

    strategy.configure_train, strategy.aggregate_train = configure_train, aggregate_train


def _record_fits(strategy: Any, files: _Files) -> None:
    configure, aggregate = strategy.configure_fit, strategy.aggregate_fit
    received: dict[int | str, _Arrays] = {}

    def configure_fit(server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        instructions = list(configure(server_round, parameters, client_manager))
        received.update(files.read_all((_node(proxy), told.parameters) for proxy, told in instructions))
        return instructions

    def aggregate_fit(server_round: int, results: list[Any], failures: list[Any]) -> Any:
        for proxy, result in results:
            files.save(_node(proxy), server_round, received.get(_node(proxy)), result.parameters)
        received.clear()
        return aggregate(server_round, results, failures)

    strategy.configure_fit, strategy.aggregate_fit = configure_fit, aggregate_fit


@dataclass(frozen=True)
class _Files:
    """The files of one mod or strategy."""

    folder: Path | str
    names: Names
    form: Sent
    arrays: str | None
    known: Circumstances

    def __post_init__(self) -> None:
        require_form(self.form)

    def save(self, node: int | str, number: int | None, before: _Arrays | None, content: Any) -> None:
        if before is None:
            raise ConfigError(
                f"node {node} answered in a round in which this strategy sent it no weights: record the outermost "
                "strategy, from its first round"
            )
        path = path_of(self.folder, f"node{node}", number)
        RecordedUpdate(before, self.read(content), self.form, self.known).save(path)

    def read_all(self, sent: Iterable[tuple[int | str, Any]]) -> dict[int | str, _Arrays]:
        """What nodes are sent; those that are sent the same object share a copy."""
        copies: dict[int, _Arrays] = {}
        found = {}
        for node, content in sent:
            if id(content) not in copies:
                copies[id(content)] = self.read(content)
            found[node] = copies[id(content)]
        return found

    def read(self, content: Any) -> _Arrays:
        """Copies of the arrays of a RecordDict, or of Parameters, by name."""
        if not hasattr(content, "array_records"):
            arrays = _flower("flwr.common").parameters_to_ndarrays(content)
            return named({str(i): array for i, array in enumerate(arrays)}, self.names)
        return named({key: array.numpy() for key, array in self._record(content.array_records).items()}, self.names)

    def _record(self, records: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.arrays is None and len(records) != 1:
            raise ConfigError(
                f"expected one ArrayRecord in a message for training, but got {len(records)} ({', '.join(records)}): "
                "give as arrays= the key of the one with the weights, and record where they are not encrypted"
            )
        key = next(iter(records)) if self.arrays is None else self.arrays
        if key not in records:
            raise ConfigError(
                f"expected an ArrayRecord {key}; got {', '.join(records) or 'none'}: give its key as arrays="
            )
        found: Mapping[str, Any] = records[key]
        return found


def _round(message: Any) -> int | None:
    """The round: strategies of `flwr.serverapp` send it in a ConfigRecord, those of `flwr.server` as the group."""
    for config in message.content.config_records.values():
        if "server-round" in config:
            return int(config["server-round"])
    group = message.metadata.group_id
    return int(group) if group.isdecimal() else None


def _node(proxy: Any) -> int | str:
    # Only proxies for a grid have a node; those of older servers have a name.
    node: int | str = getattr(proxy, "node_id", proxy.cid)
    return node


def _flower(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise missing("Flower", "flower") from error
