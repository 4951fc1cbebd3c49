"""Networks: the backbones that a federation trains, and the image prior of attacks."""

from lit_recon.models.backbone import Backbone
from lit_recon.models.checkpoint import BackboneCheckpoint, load_backbone, save_backbone
from lit_recon.models.convnet import ConvNet
from lit_recon.models.feature_layer import WideFeatureLayer
from lit_recon.models.imprint import ImprintBlock, ImprintedTrunk
from lit_recon.models.lenet import LeNet
from lit_recon.models.malicious_server import Imprint
from lit_recon.models.mlp import MLP
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork
from lit_recon.models.resnet import ResNet18
from lit_recon.models.trunk import Trunk
from lit_recon.models.unet import UNet
from lit_recon.models.wide_resnet import WideResNet

__all__ = [
    "MLP",
    "Backbone",
    "BackboneCheckpoint",
    "ConvNet",
    "Imprint",
    "ImprintBlock",
    "ImprintedTrunk",
    "LeNet",
    "ReleasedCNN",
    "ReleasedMLP",
    "ReleasedNetwork",
    "ResNet18",
    "Trunk",
    "UNet",
    "WideFeatureLayer",
    "WideResNet",
    "load_backbone",
    "save_backbone",
]
