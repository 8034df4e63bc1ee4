"""The convolutional networks of pytorchcv 0.0.67, with a cross entropy on top."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.batches import classes, images

BATCH = 5
NUM_CLASSES = 11


class Classifier(nn.Module):
    """A network and its loss."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images, classes):
        return F.cross_entropy(self.network(images), classes)


def _build(name, reduced, size, published_size=224, batch=64):
    """A factory of the network `name`; `reduced()` is its small sibling for images of `size`."""

    def build(full=False):
        torch.manual_seed(0)
        if full:
            from pytorchcv.model_provider import get_model

            given = {"images": images(batch, published_size), "classes": classes(batch, 1000)}
            return Classifier(get_model(name)), given
        given = {"images": images(BATCH, size), "classes": classes(BATCH, NUM_CLASSES)}
        given["classes"][1] = -100
        return Classifier(reduced(in_size=(size, size), num_classes=NUM_CLASSES)), given

    return build


def _alexnet(**kwargs):
    from pytorchcv.models.alexnet import AlexNet

    network = AlexNet(
        channels=[[6], [8], [9, 9, 8]],
        kernel_sizes=[[11], [5], [3, 3, 3]],
        strides=[[4], [1], [1, 1, 1]],
        paddings=[[0], [2], [1, 1, 1]],
        use_lrn=True,
        **kwargs,
    )
    return _headed(network, 8 * 2 * 2, kwargs["num_classes"])


def _vgg(**kwargs):
    from pytorchcv.models.vgg import VGG

    channels = [[n] * count for n, count in zip([4, 5, 6, 7, 8], [2, 2, 3, 3, 3], strict=True)]
    network = VGG(channels=channels, bias=True, **kwargs)
    return _headed(network, 8 * 2 * 2, kwargs["num_classes"])


def _headed(network, features, num_classes):
    """The network with small linear layers, made for what a small image leaves."""
    head = network.output
    head.fc1.fc, head.fc2.fc = nn.Linear(features, 15), nn.Linear(15, 14)
    head.fc3 = nn.Linear(14, num_classes)
    return network


def _resnet(wide=False, **kwargs):
    from pytorchcv.models.resnet import ResNet
    from pytorchcv.models.wrn import WRN

    channels = [[8], [12, 12]]
    if wide:
        network = WRN(channels=channels, init_block_channels=6, width_factor=2.0, **kwargs)
    else:
        network = ResNet(
            channels=channels, init_block_channels=6, bottleneck=True, conv1_stride=False, **kwargs
        )
    return _pooled(network, 2)


def _resnext(**kwargs):
    from pytorchcv.models.resnext import ResNeXt

    network = ResNeXt(
        channels=[[8], [12, 12]],
        init_block_channels=6,
        cardinality=2,
        bottleneck_width=32,
        **kwargs,
    )
    return _pooled(network, 2)


def _squeeze_and_excitation(**kwargs):
    from pytorchcv.models.seresnet import SEResNet

    network = SEResNet(
        channels=[[16], [20, 20]],
        init_block_channels=6,
        bottleneck=True,
        conv1_stride=False,
        **kwargs,
    )
    return _pooled(network, 2)


def _shufflenet(**kwargs):
    from pytorchcv.models.shufflenetv2b import ShuffleNetV2b

    network = ShuffleNetV2b(
        channels=[[8, 8], [12, 12]], init_block_channels=6, final_block_channels=20, **kwargs
    )
    return _pooled(network, 2)


def _darknet(**kwargs):
    from pytorchcv.models.darknet53 import DarkNet53

    network = DarkNet53(channels=[[6], [10, 10]], init_block_channels=4, **kwargs)
    return _pooled(network, 4)


def _densenet(**kwargs):
    from pytorchcv.models.densenet import DenseNet

    network = DenseNet(channels=[[10, 13], [9, 12]], init_block_channels=6, **kwargs)
    return _pooled(network, 2)


def _inception(**kwargs):
    """Every kind of unit once or twice, at a 32nd of its width."""
    from pytorchcv.models.inceptionv4 import InceptionV4

    network = InceptionV4(**kwargs)
    for stage in (network.features.stage1, network.features.stage2, network.features.stage3):
        for name in list(dict(stage.named_children()))[2:]:
            delattr(stage, name)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, _thin(child, 32))
    return _pooled(network, 1)


def _pooled(network, size):
    """The network with its last pool over what a small image leaves."""
    network.features.final_pool = nn.AvgPool2d(size)
    return network


def _thin(layer, factor):
    """The layer with a `factor`th of its channels."""
    if isinstance(layer, nn.Conv2d):
        return nn.Conv2d(
            layer.in_channels // factor or 3,
            layer.out_channels // factor,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            bias=layer.bias is not None,
        )
    if isinstance(layer, nn.BatchNorm2d):
        return nn.BatchNorm2d(layer.num_features // factor, eps=layer.eps)
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features // factor, layer.out_features)
    return layer


def _efficientnet(**kwargs):
    from pytorchcv.models.efficientnet import EfficientNet

    return EfficientNet(
        channels=[[4], [6, 6], [10]],
        init_block_channels=8,
        final_block_channels=20,
        kernel_sizes=[[3], [3, 3], [5]],
        strides_per_stage=[1, 2, 2],
        expansion_factors=[[1], [6, 6], [6]],
        **kwargs,
    )


def _mobilenet(**kwargs):
    from pytorchcv.models.mobilenetv2 import MobileNetV2

    network = MobileNetV2(
        channels=[[4], [6, 6], [8]],
        init_block_channels=8,
        final_block_channels=20,
        remove_exp_conv=False,
        **kwargs,
    )
    return _pooled(network, 2)


PYTORCHCV = {
    "alexnet": _build("alexnet", _alexnet, 96),
    "vgg16": _build("vgg16", _vgg, 64),
    "resnet50": _build("resnet50", _resnet, 16),
    "wide resnet": _build("wrn50_2", partial(_resnet, wide=True), 16),
    "resnext50": _build("resnext50_32x4d", _resnext, 16),
    "se-resnet50": _build("seresnet50", _squeeze_and_excitation, 16),
    "shufflenetv2": _build("shufflenetv2b_w1", _shufflenet, 32),
    "darknet53": _build("darknet53", _darknet, 16),
    "densenet121": _build("densenet121", _densenet, 16),
    "inceptionv4": _build("inceptionv4", _inception, 75, 299),
    "efficientnet_b0": _build("efficientnet_b0", _efficientnet, 32),
    "mobilenetv2": _build("mobilenetv2_w1", _mobilenet, 16),
}
