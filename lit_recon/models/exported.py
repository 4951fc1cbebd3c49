"""Classifiers from files of `torch.export.save`, whose source code is not needed."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from lit_recon.errors import ConfigError, CorruptFileError, LitReconError, MissingDataError, UnsupportedModelError
from lit_recon.io.files import parse_json
from lit_recon.io.tensors import check_archive

#: What the sizes of a graph are computed from; PyTorch's loader evaluates them as Python.
_NAMES = "Add Mul Pow Integer Rational Min Max FloorDiv CleanDiv CeilDiv Mod PythonMod ModularIndexing"
_SIZES = re.compile(
    rf"(?:Symbol\('[su]\d+'(?:, [a-z]+=(?:True|False))*\)|{_NAMES.replace(' ', '|')}|[su]\d+|\d+|[-+*/(), <>=])*"
)
#: Operations that compute with tensors and sizes; others open files, or read memory that is not theirs.
_OPERATIONS = re.compile(
    r"torch\.ops\.(?:(?:prims|higher_order|torchvision)\.\w+(?:\.\w+)?"
    r"|aten\.(?!from_file|set_\.|set_data|data_ptr|\w*unsafe_(?!view|split))\w+\.\w+)"
    r"|_operator\.\w+|math\.\w+|torch\.sym_\w+"
)
_REMEDY = "save the model anew by torch.export.save(torch.export.export(model, (images,)), path)"
_DYNAMIC = "dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)"


class ExportedClassifier(nn.Module):
    """A graph of operations over its own parameters, buffers and layers.

    A `GraphModule` would lose its hooks when it is copied, such as the one that normalizes pixels.
    """

    image_shape: tuple[int, ...] | None = None

    def __init__(self, module: GraphModule) -> None:
        super().__init__()
        self.graph = module.graph
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = Interpreter(self, graph=self.graph).run(images)
        return logits


def read_exported(path: Path | str) -> nn.Module:
    """The classifier in a file of `torch.export.save`, under the names of the exported model.

    Linear, convolution, BatchNorm and dropout operations become the layers of `torch.nn` that they came from, so that
    attacks find them, and BatchNorm and dropout follow `train` and `eval` whatever mode was exported. Other uses of a
    layer's weights remain operations. In a configuration:
    `model.class_path: lit_recon.models.exported.read_exported` and `model.init_args.path: FILE`.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: not a file of `torch.export.save`, or one that holds more than graph and tensors: pickled
            objects, compiled code, or sizes that are no arithmetic.
        ConfigError: exported for a fixed batch size.
        UnsupportedModelError: not one input of images.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"there is no exported model at {path}: {_REMEDY}")
    try:
        _refuse_code(path)
        with _quiet():
            module = torch.export.load(path).module(check_guards=False)
        return _classifier(module, path)
    except LitReconError:
        raise
    except Exception as error:  # of the many kinds that PyTorch's loader raises
        reason = " ".join(str(error).split())[:200]
        raise CorruptFileError(f"{path} cannot be read as an exported model ({reason}): {_REMEDY}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's loader logs the traceback of an error that it then raises."""
    logger = logging.getLogger("torch.export")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _classifier(module: GraphModule, path: Path) -> nn.Module:
    """The graph as a classifier of images, or an error that says why it is none."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    shape: tuple[Any, ...] = inputs[0].meta["val"].shape if len(inputs) == 1 else ()
    if len(shape) != 4:
        raise UnsupportedModelError(
            f"the model in {path} takes {len(inputs)} inputs, the first of {len(shape) or 'unknown'} axes: export a "
            "classifier of images (n, c, h, w)"
        )
    if isinstance(shape[0], int):
        raise ConfigError(
            f"the model in {path} was exported for batches of {shape[0]} only: export it with {_DYNAMIC} and an "
            "example of at least 2 images"
        )
    found = ExportedClassifier(_with_layers(module))
    if all(isinstance(size, int) for size in shape[1:]):
        found.image_shape = tuple(shape[1:])
    return found


def _refuse_code(path: Path) -> None:
    """A CorruptFileError for a file by which PyTorch's loader would unpickle objects or evaluate more than sizes."""
    more = f"{path} holds more than an exported model's graph and tensors"
    with zipfile.ZipFile(path) as archive:
        check_archive(archive, path.stat().st_size)
        for name in archive.namelist():
            _, _, own = name.partition("/")
            if own.startswith("data/aotinductor/"):
                raise CorruptFileError(f"{more}: compiled code; {_REMEDY}")
            if own.startswith("data/sample_inputs/") and (content := archive.read(name)):
                torch.load(BytesIO(content), weights_only=True)
            if own.startswith("data/constants/") and own.endswith(".pt"):
                raise CorruptFileError(f"{more}: constants of an older PyTorch, which would be unpickled; {_REMEDY}")
            if own.startswith(("data/weights/", "data/constants/")) and own.endswith(".json"):
                for key, value in parse_json(archive.read(name).decode())["config"].items():
                    if value["use_pickle"] or not value["path_name"].startswith(("weight_", "tensor_")):
                        raise CorruptFileError(f"{more}: {key}, which would be unpickled; {_REMEDY}")
            if own.startswith("models/"):
                graph = parse_json(archive.read(name).decode())
                odd = next((size for size in _sizes(graph) if not _SIZES.fullmatch(size)), None)
                if odd is not None:
                    raise CorruptFileError(f"{more}: the size {odd[:60]!r}, which is no arithmetic; {_REMEDY}")
                other = next((target for target in _targets(graph) if not _OPERATIONS.fullmatch(target)), None)
                if other is not None:
                    raise CorruptFileError(f"{more}: the operation {other[:60]!r}, which may do more; {_REMEDY}")


def _sizes(content: Any) -> Iterator[str]:
    """All symbolic sizes in a serialized graph."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key == "expr_str":
                yield str(value)
            elif key == "range_constraints":
                yield from map(str, value)
            else:
                yield from _sizes(value)
    elif isinstance(content, list):
        for value in content:
            yield from _sizes(value)


def _targets(content: Any) -> Iterator[str]:
    """All operations in a serialized graph."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key == "nodes" and isinstance(value, list):
                yield from (str(node["target"]) for node in value)
            yield from _targets(value)
    elif isinstance(content, list):
        for value in content:
            yield from _targets(value)


def _with_layers(module: GraphModule) -> GraphModule:
    """The graph with layers of `torch.nn` in place of the operations that they consist of."""
    graph: Graph = module.graph
    for node in list(graph.nodes):
        make = _LAYERS.get(str(node.target)) if node.op == "call_function" else None
        if make is None:
            continue
        arguments = _normalized(node)
        place = _path_of(arguments.get("weight")) or f"{node.name}_layer"
        state, images = _state(module, place), node.all_input_nodes[0]
        taken = {name: _target(one) for name, one in arguments.items() if isinstance(one, Node) and one is not images}
        if taken != {name: f"{place}.{name}" for name in state if name in arguments}:
            continue  # such as a product with the weight of a layer whose bias is not added
        layer, there = make(arguments, state, node.meta["val"].dim()), _submodule(module, place)
        if layer is None or (isinstance(there, _KINDS) and repr(there) != repr(layer)):
            continue  # no layer of its own, or one that is also called with another stride
        if not isinstance(there, _KINDS):
            _put(module, place, layer)
        with graph.inserting_before(node):
            called = graph.call_module(place, (images,))
        node.replace_all_uses_with(called)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        counts = str(node.target) == "aten.add_.Tensor" and str(node.args[0].target).endswith("num_batches_tracked")
        if (counts or node.op == "get_attr") and not node.users:
            graph.erase_node(node)
    return module


def _normalized(node: Node) -> dict[str, Any]:
    """Arguments of an operation by name, defaults included."""
    schema: Any = node.target._schema  # type: ignore[union-attr]  # an operation of ATen
    given = dict(zip((one.name for one in schema.arguments), node.args, strict=False))
    return {one.name: given.get(one.name, node.kwargs.get(one.name, one.default_value)) for one in schema.arguments}


def _target(argument: Node) -> str:
    """Path of a parameter or buffer that an operation takes; empty for what is computed."""
    return str(argument.target) if argument.op == "get_attr" else ""


def _path_of(weight: object) -> str:
    """Path of the layer whose weight this is; empty if it is none, or another tensor."""
    path, _, own = _target(weight).rpartition(".") if isinstance(weight, Node) else ("", "", "")
    return path if own == "weight" else ""


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _state(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Parameters and buffers that stand directly at a path."""
    place = _submodule(module, path)
    return {} if place is None else {**dict(place.named_parameters()), **dict(place.named_buffers())}


def _put(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer at its path, with the parameters and buffers that were there."""
    for name, value in _state(module, path).items():
        if isinstance(value, nn.Parameter):
            setattr(layer, name, value)
        else:
            layer.register_buffer(name, value)
    above, _, own = path.rpartition(".")
    module.get_submodule(above).add_module(own, layer)


def _linear(arguments: dict[str, Any], state: dict[str, Tensor], n_axes: int) -> nn.Module | None:
    if set(state) not in ({"weight"}, {"weight", "bias"}):
        return None
    outputs, inputs = state["weight"].shape
    return nn.Linear(inputs, outputs, bias="bias" in state)


def _convolution(arguments: dict[str, Any], state: dict[str, Tensor], n_axes: int) -> nn.Module | None:
    if set(state) not in ({"weight"}, {"weight", "bias"}):
        return None
    outputs, inputs, *kernel = state["weight"].shape
    groups, padding = arguments["groups"], arguments["padding"]
    return nn.Conv2d(
        inputs * groups,
        outputs,
        _pair(kernel),
        stride=_pair(arguments["stride"]),
        padding=padding if isinstance(padding, str) else _pair(padding),
        dilation=_pair(arguments["dilation"]),
        groups=groups,
        bias="bias" in state,
    )


def _pair(sizes: Any) -> tuple[int, int]:
    height, width = [*sizes, *sizes][:2]
    return height, width


def _batch_norm(arguments: dict[str, Any], state: dict[str, Tensor], n_axes: int) -> nn.Module | None:
    if not {"weight", "bias", "running_mean", "running_var"} <= set(state):
        return None
    kind = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(n_axes, nn.BatchNorm1d)
    return kind(len(state["weight"]), arguments["eps"], arguments["momentum"])


def _dropout(arguments: dict[str, Any], state: dict[str, Tensor], n_axes: int) -> nn.Module | None:
    return nn.Dropout(arguments["p"])


def _feature_dropout(arguments: dict[str, Any], state: dict[str, Tensor], n_axes: int) -> nn.Module | None:
    """A layer that drops whole channels; of `(n, c)`, these are single entries."""
    kinds: dict[int, type[nn.Module]] = {3: nn.Dropout1d, 4: nn.Dropout2d, 5: nn.Dropout3d}
    return kinds.get(n_axes, nn.Dropout)(arguments["p"])


#: Operations by the layers that they become; a maker returns None where the tensors are not such a layer's.
_LAYERS: dict[str, Callable[[dict[str, Any], dict[str, Tensor], int], nn.Module | None]] = {
    "aten.linear.default": _linear,
    "aten.conv2d.default": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.batch_norm.default": _batch_norm,
    "aten.dropout.default": _dropout,
    "aten.dropout_.default": _dropout,
    "aten.feature_dropout.default": _feature_dropout,
}
_KINDS = (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
