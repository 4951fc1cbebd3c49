"""The forward operator of one federated round: the gradient of the mean loss over a client's batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.defenses.example_gradients import ExampleGradients, example_gradients
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.models.layers import used_elsewhere
from lit_recon.records import (
    Batch,
    BatchNormMode,
    BatchStatistics,
    Differentiable,
    LayerStatistics,
    Loss,
    Update,
    Weights,
)


class PureBatchNorm(nn.Module):
    """BatchNorm without side effects."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, source: _BatchNorm, mode: BatchNormMode) -> None:
        super().__init__()
        self.mode, self.eps = mode, source.eps
        self.register_parameter("weight", source.weight)
        self.register_parameter("bias", source.bias)
        for name, buffer in source.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mode == "train":
            return nn.functional.batch_norm(inputs, None, None, self.weight, self.bias, training=True, eps=self.eps)
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        return torch.addcmul(shift.view(shape), inputs, scale.view(shape))


def pure_copy(model: nn.Module, mode: BatchNormMode) -> nn.Module:
    """A deep copy of `model` in evaluation mode, with pure BatchNorm layers and without in-place activations.

    As in PyTorch, a BatchNorm layer without running statistics always uses the statistics of the batch. Subclasses
    of BatchNorm with their own forward (as in timm: BatchNorm and activation in one) keep their class. Every BatchNorm
    layer's `recorded` holds its last input's statistics while its `recording` is true. One that would take
    statistics of a single value per channel raises an `UnsupportedModelError`.
    """
    copied = copy.deepcopy(model).eval()
    parent: Any
    for path, parent in list(copied.named_modules()):
        if getattr(parent, "inplace", None) is True:
            parent.inplace = False
        for name, child in parent.named_children():
            if not isinstance(child, _BatchNorm):
                continue
            pure: Any = child
            if type(child).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                pure = PureBatchNorm(child, mode if child.running_mean is not None else "train")
                setattr(parent, name, pure)
            else:
                pure.training, pure.track_running_stats = mode == "train", mode == "eval"
            pure.recording, pure.recorded = False, None
            pure.register_forward_pre_hook(partial(_record, f"{path}.{name}".lstrip(".")))
    return copied.requires_grad_(False)


@contextmanager
def recording(norms: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts, the BatchNorm layers of a `pure_copy` hold in `recorded` what reached them in a forward pass."""
    for norm in norms.values():
        norm.recording = True
    try:
        yield
    finally:
        for norm in norms.values():
            norm.recording, norm.recorded = False, None


def _of_batch(layer: Any) -> bool:
    """Whether a BatchNorm layer of a `pure_copy` uses the statistics of the batch."""
    if isinstance(layer, PureBatchNorm):
        return layer.mode == "train"
    return bool(layer.training) or layer.running_mean is None


def _record(name: str, layer: Any, given: tuple[Tensor, ...]) -> None:
    """Mean and biased variance per channel of a layer's input `(n, f, ...)`."""
    if _of_batch(layer) and given[0].numel() == given[0].shape[1]:
        raise UnsupportedModelError(
            f"BatchNorm layer {name!r} needs more than one value per channel for the statistics of a batch; got "
            f"{tuple(given[0].shape)}: take larger batches, or a backbone with GroupNorm (norm: group); a client may "
            "use running statistics (batch_norm: eval)"
        )
    if layer.recording:
        axes = [axis for axis in range(given[0].dim()) if axis != 1]
        mean = given[0].mean(axes, keepdim=True)
        # with its derivatives twice as fast as torch.var_mean on a CPU; on a GPU not measured
        layer.recorded = LayerStatistics(mean=mean.flatten(), var=(given[0] - mean).square().mean(axes))


#: Classes, spread over all, whose losses are compared with that of a batch of them.
_MOST_CLASSES = 100


@torch.enable_grad()
def checked_loss(loss: Loss, n_classes: int, like: Tensor, probabilities: bool = False) -> Loss:
    """`loss`, or `cross_entropy` for a `torch.nn.CrossEntropyLoss` with default settings.

    It is tried in the dtype and on the device of `like`, as the model's logits have them.

    Raises:
        ConfigError: on logits `(n, k)` and labels, classes `(n,)` or probabilities `(n, k)`, the loss fails or does not
            return a scalar that can be differentiated twice; or it is not the mean of the losses of single examples.
    """
    if loss is cross_entropy or (isinstance(loss, nn.CrossEntropyLoss) and vars(loss) == vars(nn.CrossEntropyLoss())):
        return cross_entropy
    name = getattr(loss, "__name__", type(loss).__name__)
    logits = torch.linspace(-1, 1, 2 * n_classes).view(2, n_classes).to(like).requires_grad_()
    classes = torch.tensor([0, n_classes - 1], device=like.device)
    labels = torch.full_like(logits, 1 / n_classes, requires_grad=False) if probabilities else classes
    kind = f"probabilities (2, {n_classes})" if probabilities else "classes (2,)"
    try:
        value: object = loss(logits, labels)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the loss {name} fails on logits (2, {n_classes}) and labels that are {kind}: {reason}; it must be a "
            f"callable of (logits, labels), here {like.dtype} on {like.device}, that returns their mean loss"
        ) from error
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.requires_grad:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"the loss {name} must return one number that is differentiable in the logits, the mean over the batch; "
            f"got {got}"
        )
    try:
        (gradient,) = torch.autograd.grad(value, logits, create_graph=True)
        if gradient.requires_grad:
            torch.autograd.grad(gradient.square().sum(), logits, allow_unused=True)
    except RuntimeError as error:
        raise ConfigError(
            f"attacks differentiate the loss twice, and {name} cannot be ({error}): write it with operations that can"
        ) from error
    _check_mean(loss, name, n_classes, like, probabilities)
    return loss


@torch.no_grad()
def _check_mean(loss: Loss, name: str, n_classes: int, like: Tensor, probabilities: bool) -> None:
    """Refuse a loss that weights or sums examples: clipping one by one, aggregation and bounds add their gradients."""
    n = max(2, min(n_classes, _MOST_CLASSES))
    logits = torch.arange(n * n_classes, dtype=torch.float64).sin().view(n, n_classes).to(like)
    labels = torch.linspace(0, n_classes - 1, n).round().long().to(like.device)
    if probabilities:
        labels = nn.functional.one_hot(labels, n_classes).to(logits)
    try:
        value = loss(logits, labels)
        alone = torch.stack([loss(logits[i : i + 1], labels[i : i + 1]) for i in range(n)])
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the loss {name} fails on a batch of {n} examples or on a single one: {reason}; it must take any number"
        ) from error
    tolerance = math.sqrt(torch.finfo(alone.dtype).eps) * float(alone.abs().mean())
    if not abs(float(value) - float(alone.mean())) <= tolerance:
        raise ConfigError(
            f"the loss {name} must be the mean of the losses of single examples; it is {float(value):.4g} for {n} "
            f"examples whose losses have the mean {float(alone.mean()):.4g}: leave weights of classes and sums over "
            "the batch out"
        )


class GradientOperator:
    """Gradient of the mean loss of a batch in every parameter of a model; zero for parameters without influence.

    Pure: the weights are arguments and nothing is modified, so that the client that releases an update and the attacker
    who simulates it run the same code. Differentiable twice.

    Args:
        model: takes images `(n, c, h, w)` in [0, 1] and returns logits `(n, k)`; copied. Dropout is off.
        batch_norm: whether BatchNorm layers use running (`eval`) or batch statistics (`train`).
        loss: of logits and labels, a mean over the batch.
    """

    def __init__(self, model: nn.Module, batch_norm: BatchNormMode = "eval", loss: Loss = cross_entropy) -> None:
        self.batch_norm: BatchNormMode = batch_norm
        self._model = pure_copy(model, batch_norm)
        self._norms = {name: layer for name, layer in self._model.named_modules() if hasattr(layer, "recording")}
        self._loss = loss
        self._by_layers: bool | None = None  # whether layers tell `examples`; None: not known yet
        # PyTorch's fused attention kernels cannot be differentiated twice; parts of this package have none
        packages = {type(part).__module__.partition(".")[0] for part in model.modules()}
        self._without_attention = isinstance(model, Backbone) and packages <= {"lit_recon", "torch"}

    @property
    def parts(self) -> int:
        return 1

    @property
    def additive(self) -> bool:
        """See `ForwardOperator`; not with statistics of the batch."""
        return not any(map(_of_batch, self._norms.values()))

    def loss(self, weights: Weights, batch: Batch) -> Tensor:
        """Mean loss of the batch."""
        tensors = dict(weights.parameters), {**weights.buffers, **batch.masks}
        with nullcontext() if self._without_attention else sdpa_kernel(SDPBackend.MATH):
            logits = torch.func.functional_call(self._model, tensors, (batch.images,))
        return self._loss(logits, batch.labels)

    def __call__(self, weights: Weights, batch: Batch, differentiable: Differentiable = "no") -> Update:
        return self._run(weights, batch, differentiable, {})[0]

    def examples(self, weights: Weights, batch: Batch) -> ExampleGradients | None:
        """The gradients of single examples as `example_gradients` holds them; the loss has to be a mean of theirs."""
        constant = Weights({name: value.detach() for name, value in weights.parameters.items()}, weights.buffers)
        found = example_gradients(self._model, partial(self.loss, constant, batch), len(batch.images))
        if found is not None and self._by_layers is None:  # the same in every pass
            layers = [layer for layer in self._model.modules() if any(True for _ in layer.parameters(False))]
            run, one = partial(self._loss_of, weights.buffers, batch), batch.examples(0, 1)
            # a first axis of parts of images is not that of the examples where their numbers differ
            alone = example_gradients(self._model, partial(self.loss, constant, one), 1)
            self._by_layers = alone is not None and not used_elsewhere(layers, weights.parameters, run)
        return found if self._by_layers else None

    def _loss_of(self, buffers: Mapping[str, Tensor], batch: Batch, parameters: Mapping[str, Tensor]) -> Tensor:
        return self.loss(Weights(parameters, buffers), batch)

    def with_statistics(
        self, weights: Weights, batch: Batch, differentiable: Differentiable = "no"
    ) -> tuple[Update, BatchStatistics]:
        return self._run(weights, batch, differentiable, self._norms)

    def statistics(self, weights: Weights, batch: Batch) -> BatchStatistics:
        return self._recorded_loss(weights, batch, self._norms)[1]

    def _recorded_loss(self, weights: Weights, batch: Batch, norms: dict[str, Any]) -> tuple[Tensor, BatchStatistics]:
        """The loss, and the statistics of the inputs of `norms`."""
        with recording(norms):
            loss = self.loss(weights, batch)
            return loss, {name: _recorded(name, norm.recorded) for name, norm in norms.items()}

    def _run(
        self, weights: Weights, batch: Batch, differentiable: Differentiable, norms: dict[str, Any]
    ) -> tuple[Update, BatchStatistics]:
        """The gradient, and the statistics of the inputs of `norms`."""

        def loss_of(parameters: Mapping[str, Tensor]) -> tuple[Tensor, BatchStatistics]:
            return self._recorded_loss(Weights(parameters, weights.buffers), batch, norms)

        if differentiable == "functional":
            update: Update
            update, statistics = torch.func.grad(loss_of, has_aux=True)(dict(weights.parameters))
            return update, statistics
        leaves = {name: value.detach().requires_grad_() for name, value in weights.parameters.items()}
        with torch.enable_grad():
            loss, statistics = loss_of(leaves)
        return gradient_by_name(loss, leaves, differentiable), statistics


def gradient_by_name(loss: Tensor, parameters: Mapping[str, Tensor], differentiable: Differentiable) -> Update:
    """The gradient by plain autograd; zero for parameters without influence."""
    keep = differentiable == "autograd"
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=keep, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def _recorded(name: str, statistics: LayerStatistics | None) -> LayerStatistics:
    if statistics is None:
        raise UnsupportedModelError(f"the forward pass does not use BatchNorm layer {name!r}: remove it from the model")
    return statistics
