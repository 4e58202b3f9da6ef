"""Image classification: a network by its name, on digits, CIFAR-10 or a folder of images."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dsgd.tasks.base import Classifier, SplitData
from lightning_dsgd.tasks.networks import build

CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
"""The checksum of cifar-10-binary.tar.gz on https://www.cs.toronto.edu/~kriz/cifar.html."""
CIFAR10_RECORD = 1 + 3 * 32 * 32
"""Bytes of an image in CIFAR-10's binary format: the class, then red, green and blue rows."""
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageClassifier(Classifier):
    """Trains a network of `lightning_dsgd.tasks.networks`.

    Args:
        network: its name: "resnet8", "resnet20", "resnet18", "resnet50", "resnet101", "vgg16",
            "vgg16_bn", "mobilenet_v2", "densenet121" or "googlenet".
        image_shape: channels, height and width of the images; (1, 8, 8) are the digits.
        num_classes: how many classes there are.
        label_smoothing: the part of the target that all classes share.
        **kwargs: options of `Classifier` and `Task`.
    """

    def __init__(
        self,
        network: str = "resnet8",
        image_shape: tuple[int, int, int] = (1, 8, 8),
        num_classes: int = 10,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            build(network, image_shape, num_classes),
            num_classes,
            label_smoothing=label_smoothing,
            **kwargs,
        )
        self.save_hyperparameters()


class Images(Dataset[tuple[Tensor, int]]):
    """Holds images in memory as bytes; normalises each, and moves it at random if asked to."""

    def __init__(self, pixels: Tensor, classes: Tensor, augment: bool) -> None:
        self.pixels = pixels
        self.classes = classes
        self.augment = augment
        self.mean = torch.tensor(CIFAR10_MEAN)[:, None, None]
        self.std = torch.tensor(CIFAR10_STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = (self.pixels[index].float() / 255 - self.mean) / self.std
        if self.augment:
            image = flipped_or_not(torch.nn.functional.pad(image, (4, 4, 4, 4)))
            top, left = torch.randint(0, 9, (2,)).tolist()
            image = image[:, top : top + 32, left : left + 32]
        return image, int(self.classes[index])


def flipped_or_not(image: Tensor) -> Tensor:
    """Returns the image, or with equal chance its mirror image."""
    return image.flip(-1) if torch.rand(()) < 0.5 else image


class CIFAR10Data(SplitData):
    """Loads CIFAR-10 in its binary version, https://www.cs.toronto.edu/~kriz/cifar.html.

    As in the papers, the 10,000 test images serve to validate and to test.

    Args:
        path: cifar-10-binary.tar.gz, or the folder that it unpacks to (or the folder around that).
        batch_size: images a rank and step.
        num_workers: loader processes a rank.
        augment: whether training images are mirrored at random, and moved by up to 4 pixels.
        md5: checksum that the archive must have; None to take any.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 128,
        num_workers: int = 0,
        augment: bool = True,
        md5: str | None = CIFAR10_MD5,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.path = Path(path)
        self.augment = augment
        self.md5 = md5

    def setup(self, stage: str) -> None:
        read = self._open()
        train = _decode(read, [f"data_batch_{i}.bin" for i in range(1, 6)])
        test = _decode(read, ["test_batch.bin"])
        self.splits["train"] = Images(*train, augment=self.augment)
        self.splits["val"] = self.splits["test"] = Images(*test, augment=False)

    def _open(self) -> Callable[[str], bytes]:
        """Returns a function from the name of a file to its bytes."""
        if self.path.is_dir():
            inner = self.path / "cifar-10-batches-bin"
            folder = inner if inner.is_dir() else self.path
            return lambda name: (folder / name).read_bytes()
        if not self.path.exists():
            raise FileNotFoundError(
                "CIFAR10Data must find cifar-10-binary.tar.gz, or the folder that it unpacks to, "
                f"got path={str(self.path)!r}, which does not exist; it is at "
                "https://www.cs.toronto.edu/~kriz/cifar.html"
            )
        with self.path.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if self.md5 is not None and found != self.md5:
            raise ValueError(
                f"the md5 of {self.path} must be {self.md5}, got {found}: "
                "the archive is damaged or another one; fetch it again"
            )
        contents = {}
        with tarfile.open(self.path) as archive:
            for member in archive:
                if member.name.endswith(".bin") and (file_in := archive.extractfile(member)):
                    contents[Path(member.name).name] = file_in.read()
        return contents.__getitem__


def _decode(read: Callable[[str], bytes], names: list[str]) -> tuple[Tensor, Tensor]:
    """Returns pixels (n, 3, 32, 32) and classes (n,), both of bytes."""
    parts = []
    for name in names:
        data = torch.frombuffer(bytearray(read(name)), dtype=torch.uint8)
        if len(data) % CIFAR10_RECORD or (data[::CIFAR10_RECORD] > 9).any():
            raise ValueError(
                f"{name} must hold records of {CIFAR10_RECORD} bytes, each with a class from 0 to "
                f"9 first, got {len(data)} bytes of another form; is it CIFAR-10's binary version?"
            )
        parts.append(data.reshape(-1, CIFAR10_RECORD))
    records = torch.cat(parts)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Loads images from one folder a class, decoded by Pillow.

    To train, it takes a random part of 8% to 100% of the area, mirrored or not; else the middle of
    the image, whose shorter side is 256/224 of `image_size`.
    """

    def __init__(self, folder: Path, image_size: int, augment: bool) -> None:
        self.image_size = image_size
        self.augment = augment
        self.names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.files = [
            (file, number)
            for number, name in enumerate(self.names)
            for file in sorted((folder / name).rglob("*"))
            if file.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp", ".bmp")
        ]
        if not self.files:
            raise ValueError(
                f"{folder} must hold one folder a class with images (jpeg, png, webp, bmp) in it, "
                f"got {len(self.names)} folders without one"
            )
        self.mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
        self.std = torch.tensor(IMAGENET_STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        file, number = self.files[index]
        size = self.image_size
        with Image.open(file) as encoded:
            image = encoded.convert("RGB")
        box = _random_box(*image.size) if self.augment else _middle_box(*image.size)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        tensor = pixels.reshape(size, size, 3).permute(2, 0, 1).float() / 255
        tensor = (tensor - self.mean) / self.std
        return (flipped_or_not(tensor) if self.augment else tensor), number


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def _middle_box(width: int, height: int) -> Box:
    side = min(width, height) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int) -> Box:
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(0.08, 1))
        ratio = float(torch.empty(()).uniform_(-1, 1).mul_(0.2877).exp_())  # 3/4 to 4/3
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = (torch.rand(2) * torch.tensor([width - w, height - h])).tolist()
            return left, top, left + w, top + h
    return _middle_box(width, height)


class ImageFolderData(SplitData):
    """Loads images in folders, as ImageNet is unpacked: train/CLASS/*.JPEG and val/CLASS/*.JPEG.

    The images of `val` serve to validate and to test.  Needs the extra `images` (Pillow).

    Args:
        root: the folder with `train` and `val` in it.
        image_size: the side of the images that the network sees.
        batch_size: images a rank and step.
        num_workers: loader processes a rank.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self,
        root: str,
        image_size: int = 224,
        batch_size: int = 32,
        num_workers: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.root = Path(root)
        self.image_size = image_size

    def setup(self, stage: str) -> None:
        try:
            import PIL.Image  # noqa: F401 - asked for here, before a loader process needs it
        except ImportError as err:
            raise ImportError(
                "ImageFolderData needs Pillow, which is not installed; try: pip install pillow"
            ) from err
        for split in ("train", "val"):
            if not (self.root / split).is_dir():
                raise FileNotFoundError(
                    f"root must hold the folders train and val, got root={str(self.root)!r}, "
                    f"which has no folder {split}"
                )
        train = ImageFolder(self.root / "train", self.image_size, augment=True)
        val = ImageFolder(self.root / "val", self.image_size, augment=False)
        if train.names != val.names:
            raise ValueError(
                "train and val must hold folders of the same names, got in only one of them: "
                f"{', '.join(sorted(set(train.names) ^ set(val.names)))}"
            )
        self.splits = {"train": train, "val": val, "test": val}
