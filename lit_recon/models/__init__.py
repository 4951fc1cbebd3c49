"""Networks: classifiers under attack, and generative image priors of attacks."""

from __future__ import annotations

from lit_recon.models.checkpoint import BackboneCheckpoint, load_backbone, save_backbone
from lit_recon.models.classifiers.backbone import Backbone, Trunk
from lit_recon.models.classifiers.feature_layer import WideFeatureLayer
from lit_recon.models.classifiers.foreign import PublicModel, build_module, load_weights, public_model
from lit_recon.models.classifiers.imprint import Imprint, ImprintBlock, ImprintedTrunk
from lit_recon.models.classifiers.networks import MLP, ConvNet, LeNet, ResNet18, WideResNet
from lit_recon.models.generative.unet import UNet

__all__ = [
    "MLP",
    "Backbone",
    "BackboneCheckpoint",
    "ConvNet",
    "Imprint",
    "ImprintBlock",
    "ImprintedTrunk",
    "LeNet",
    "PublicModel",
    "ResNet18",
    "Trunk",
    "UNet",
    "WideFeatureLayer",
    "WideResNet",
    "build_module",
    "load_backbone",
    "load_weights",
    "public_model",
    "save_backbone",
]
