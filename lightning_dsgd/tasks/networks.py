"""The image networks of the papers' experiments: one builder a family.

`build(name, image_shape, num_classes)` makes one by its name in `NETWORKS`.  An image of up to 64
pixels a side gets the stem that is usual for CIFAR-10 (a 3 x 3 convolution, no pooling), a larger
one that of ImageNet.  Convolutions start as in He et al. (https://arxiv.org/abs/1502.01852), the
last normalisation of a residual block at 0, as in Goyal et al. (https://arxiv.org/abs/1706.02677,
section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


def normalized(
    channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Makes a convolution and a normalisation."""
    return nn.Sequential(
        nn.Conv2d(
            channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False
        ),
        nn.BatchNorm2d(channels_out),
    )


def convolution(
    channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Makes a convolution, a normalisation and a ReLU."""
    return nn.Sequential(
        normalized(channels_in, channels_out, kernel, stride, groups), nn.ReLU(inplace=True)
    )


def stem(image_shape: Shape, channels_out: int) -> nn.Sequential:
    """Makes the first convolution, and for large images the pooling after it."""
    channels, height, _ = image_shape
    if height <= 64:
        return convolution(channels, channels_out)
    return nn.Sequential(
        convolution(channels, channels_out, kernel=7, stride=2), nn.MaxPool2d(3, 2, padding=1)
    )


def head(channels_in: int, num_classes: int, dropout: float = 0.0) -> nn.Sequential:
    """Makes the mean over the image, and a linear layer."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(channels_in, num_classes),
    )


class Residual(nn.Module):
    """Computes ReLU(body(x) + shortcut(x)), He et al., https://arxiv.org/abs/1512.03385."""

    def __init__(self, channels_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            channels_out = 4 * width
            layers = [convolution(channels_in, width, 1), convolution(width, width, 3, stride)]
            last = normalized(width, channels_out, 1)
        else:
            channels_out = width
            layers = [convolution(channels_in, width, 3, stride)]
            last = normalized(width, width)
        nn.init.zeros_(last[1].weight)  # type: ignore[arg-type]
        self.body = nn.Sequential(*layers, last)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = normalized(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(
    image_shape: Shape, num_classes: int, blocks: tuple[int, ...], width: int, bottleneck: bool
) -> nn.Module:
    """Makes a ResNet, https://arxiv.org/abs/1512.03385; stages after the first halve the image."""
    layers: list[nn.Module] = [stem(image_shape, width)]
    channels = width
    for stage, num_blocks in enumerate(blocks):
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(channels, width << stage, stride, bottleneck))
            channels = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, head(channels, num_classes))


def vgg16(image_shape: Shape, num_classes: int, batch_norm: bool) -> nn.Module:
    """Makes a VGG-16, https://arxiv.org/abs/1409.1556, configuration D.

    On small images one linear layer follows the convolutions, instead of three.
    """
    channels, height, width = image_shape
    if min(height, width) < 32:
        raise ValueError(
            f"vgg16 halves an image five times, which must be at least 32 x 32, got image_shape="
            f"{image_shape}; try network='resnet8'"
        )
    layers: list[nn.Module] = []
    for channels_out, num in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(num):
            layers.append(nn.Conv2d(channels, channels_out, 3, padding=1))
            layers += [nn.BatchNorm2d(channels_out)] if batch_norm else []
            layers.append(nn.ReLU(inplace=True))
            channels = channels_out
        layers.append(nn.MaxPool2d(2))
    features = channels * (height // 32) * (width // 32)
    layers.append(nn.Flatten())
    if height > 64:
        for _ in range(2):
            layers += [nn.Linear(features, 4096), nn.ReLU(inplace=True), nn.Dropout()]
            features = 4096
    return nn.Sequential(*layers, nn.Linear(features, num_classes))


class InvertedResidual(nn.Module):
    """Widens, convolves each channel apart, and narrows: Sandler et al., Figure 3."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = channels_in * expansion
        widen = [convolution(channels_in, width, 1)] if expansion > 1 else []
        self.body = nn.Sequential(
            *widen,
            convolution(width, width, 3, stride, groups=width),
            normalized(width, channels_out, 1),
        )
        self.add = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.add else y


def mobilenet_v2(image_shape: Shape, num_classes: int) -> nn.Module:
    """Makes a MobileNetV2, https://arxiv.org/abs/1801.04381, Table 2.

    On small images the first three of the five strides are 1.
    """
    small = image_shape[1] <= 64
    layers: list[nn.Module] = [convolution(image_shape[0], 32, stride=1 if small else 2)]
    channels = 32
    for expansion, width, num, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 1 if small else 2),
        (6, 32, 3, 1 if small else 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(num):
            layers.append(InvertedResidual(channels, width, stride if block == 0 else 1, expansion))
            channels = width
    return nn.Sequential(*layers, convolution(channels, 1280, 1), head(1280, num_classes, 0.2))


class DenseLayer(nn.Module):
    """Appends `growth` channels to its input."""

    def __init__(self, channels_in: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels_in),
            nn.ReLU(inplace=True),
            convolution(channels_in, 4 * growth, 1),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.body(x)), 1)


def densenet(
    image_shape: Shape, num_classes: int, blocks: tuple[int, ...], growth: int
) -> nn.Module:
    """Makes a DenseNet, https://arxiv.org/abs/1608.06993, with bottlenecks and compression by 2."""
    channels = 2 * growth
    layers: list[nn.Module] = [stem(image_shape, channels)]
    for i, num in enumerate(blocks):
        if i > 0:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(num):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, head(channels, num_classes))


class Inception(nn.Module):
    """Puts four branches side by side: Szegedy et al., Figure 2(b)."""

    def __init__(
        self, channels_in: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            (
                convolution(channels_in, one, 1),
                nn.Sequential(convolution(channels_in, three[0], 1), convolution(*three)),
                nn.Sequential(convolution(channels_in, five[0], 1), convolution(*five, kernel=5)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), convolution(channels_in, pool, 1)),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet(image_shape: Shape, num_classes: int) -> nn.Module:
    """Makes a GoogLeNet, https://arxiv.org/abs/1409.4842, Table 1, normalised, with one head."""
    return nn.Sequential(
        stem(image_shape, 64),
        convolution(64, 64, 1),
        convolution(64, 192),
        nn.MaxPool2d(3, 2, padding=1),
        Inception(192, 64, (96, 128), (16, 32), 32),
        Inception(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool2d(3, 2, padding=1),
        Inception(480, 192, (96, 208), (16, 48), 64),
        Inception(512, 160, (112, 224), (24, 64), 64),
        Inception(512, 128, (128, 256), (24, 64), 64),
        Inception(512, 112, (144, 288), (32, 64), 64),
        Inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(3, 2, padding=1),
        Inception(832, 256, (160, 320), (32, 128), 128),
        Inception(832, 384, (192, 384), (48, 128), 128),
        head(1024, num_classes, 0.2),
    )


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "resnet8": partial(resnet, blocks=(1, 1, 1), width=16, bottleneck=False),
    "resnet20": partial(resnet, blocks=(3, 3, 3), width=16, bottleneck=False),
    "resnet18": partial(resnet, blocks=(2, 2, 2, 2), width=64, bottleneck=False),
    "resnet50": partial(resnet, blocks=(3, 4, 6, 3), width=64, bottleneck=True),
    "resnet101": partial(resnet, blocks=(3, 4, 23, 3), width=64, bottleneck=True),
    "vgg16": partial(vgg16, batch_norm=False),
    "vgg16_bn": partial(vgg16, batch_norm=True),
    "mobilenet_v2": mobilenet_v2,
    "densenet121": partial(densenet, blocks=(6, 12, 24, 16), growth=32),
    "googlenet": googlenet,
}


def build(name: str, image_shape: Shape, num_classes: int) -> nn.Module:
    """Makes the network of a name.

    Args:
        name: a key of `NETWORKS`.
        image_shape: channels, height and width of the network's input.
        num_classes: the number of classes that it tells apart.

    Returns:
        The network, from images (n, *image_shape) to logits (n, num_classes).
    """
    if name not in NETWORKS:
        raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got network={name!r}")
    net = NETWORKS[name](image_shape, num_classes)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net
