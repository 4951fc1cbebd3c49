"""NVFlare: a filter that records the weights a client receives and the weights, or differences, that it sends.

It belongs into both lists of filters of the client's configuration, in `task_result_filters` behind all others:

    {"tasks": ["train"], "filters": [
        {"path": "lit_recon.clients.adapters.nvflare.RecordingFilter", "args": {"folder": "updates"}}]}
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_recon.clients.adapters.arrays import missing, named, path_of
from lit_recon.clients.record import Circumstances, RecordedUpdate, Sent
from lit_recon.errors import ConfigError

try:
    from nvflare.apis.dxo import DataKind, MetaKey
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.filter import FilterChainType, FilterContextKey
except ImportError:  # RecordingFilter says so when it is made; the module can be read without NVFlare
    DXOFilter = object

#: Where the context of a task keeps what the client received, and the round.
_RECEIVED = "lit_recon.received"
_ROUND = "current_round"


class RecordingFilter(DXOFilter):  # type: ignore[misc]
    """Writes `<SITE>-round<N>.safetensors` for each task, and passes all data through unchanged.

    Args:
        folder: for the files; a file of the same name is replaced.
        known: entries of `Circumstances` by name.

    Raises:
        ConfigError: without NVFlare.
    """

    def __init__(self, folder: str, known: dict[str, Any] | None = None) -> None:
        if DXOFilter is object:
            raise missing("NVFlare", "nvflare")
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        # NVFlare's job API writes attributes with the names of arguments into its configuration.
        self.folder = folder
        self.known = known
        self._circumstances = Circumstances(**(known or {}))

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> None:
        """Record, and return None, which means unchanged."""
        processed = dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM)
        if processed:
            raise ConfigError(
                f"the weights were processed by {processed}: put RecordingFilter before the filter that does it, or "
                "behind the one that reverses it"
            )
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_RESULT_CHAIN:
            self._write(dxo, fl_ctx)
        else:
            self._receive(dxo, shareable, fl_ctx)

    def _receive(self, dxo: Any, shareable: Any, fl_ctx: Any) -> None:
        if dxo.data_kind != DataKind.WEIGHTS or fl_ctx.get_prop(_RECEIVED) is not None:
            raise ConfigError(
                "expected one set of weights in the data of a task, but got differences or several sets: give "
                "RecordingFilter only the tasks that train"
            )
        number = shareable.get_header(_ROUND, fl_ctx.get_prop(_ROUND))
        # The context of this task alone, not of later ones: private to this client, not sticky.
        fl_ctx.set_prop(_RECEIVED, (number, named(dxo.data, list(dxo.data))), private=True, sticky=False)

    def _write(self, dxo: Any, fl_ctx: Any) -> None:
        received: tuple[int | None, dict[str, Tensor]] | None = fl_ctx.get_prop(_RECEIVED)
        if received is None:
            raise ConfigError(
                "expected weights that the client received for this task, but got none: add RecordingFilter to "
                "task_data_filters too, for the same tasks"
            )
        number, before = received
        sent = named(dxo.data, list(dxo.data))
        form: Sent = "weights"
        if dxo.data_kind == DataKind.WEIGHT_DIFF:  # NVFlare's differences are weights after minus before
            sent, form = {name: -value for name, value in sent.items()}, "difference"
        path = path_of(self.folder, fl_ctx.get_identity_name(), number)
        RecordedUpdate(before, sent, form, self._circumstances).save(path)
