"""The tasks: networks have the sizes that are published, loaders read files of the true formats."""

from __future__ import annotations

import hashlib
import io
import math
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dsgd.tasks.base import Classifier
from lightning_dsgd.tasks.images import CIFAR10Data, ImageFolderData
from lightning_dsgd.tasks.language import CausalLanguageModel, MaskedLanguageModel, TextData, hide
from lightning_dsgd.tasks.networks import build
from lightning_dsgd.tasks.speech import SpeechData, SpeechRecognizer
from lightning_dsgd.tasks.text import (
    MASK,
    NUM_SMALLEST,
    NUM_SPECIAL,
    read_corpus,
    tokenizer_of,
)
from lightning_dsgd.tasks.translation import TranslationData, TranslationModel
from tests.support import models
from tests.support.fits import some_now


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models are slower on several, by far if the cores have other work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def trainer(devices: int = 1, strategy: str = "auto", **options: Any) -> L.Trainer:
    return models.trainer(strategy, devices, num_sanity_val_steps=0, **options)


# ---- optimizer and schedule ----
class Rates(L.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


RATES: list[tuple[dict[str, Any], list[float]]] = [
    (  # milestones count epochs
        {"decay": "milestones", "milestones": (1, 3), "decay_factor": 0.5},
        [1.0] * 4 + [0.5] * 8 + [0.25] * 4,
    ),
    ({"decay": "linear"}, [1, 0.75, 0.5, 0.25]),
    ({"decay": "cosine"}, [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]),
    (
        {"decay": "inverse_sqrt", "warmup": 4, "schedule_unit": "step"},
        [0.2, 0.4, 0.6, 0.8, 1, *((4 / k) ** 0.5 for k in (5, 6, 7))],
    ),
]


@pytest.mark.parametrize(("options", "expected"), RATES, ids=str)
def test_rates_follow_their_schedule(options: dict[str, Any], expected: list[float]) -> None:
    """In epochs of four steps."""
    seen, max_epochs = Rates(), len(expected) // 4
    data = DataLoader(TensorDataset(torch.randn(4, 3), torch.zeros(4).long()))
    model = Classifier(nn.Linear(3, 2), 2, lr=1.0, **options)
    trainer(max_epochs=max_epochs, callbacks=[seen], limit_val_batches=1).fit(model, data, data)
    assert seen.rates == pytest.approx(expected)


# ---- images ----
SIZES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: build("resnet18", (3, 224, 224), 1000), 11_689_512),
    "resnet50": (lambda: build("resnet50", (3, 224, 224), 1000), 25_557_032),
    "vgg16_bn": (lambda: build("vgg16_bn", (3, 32, 32), 10), 14_728_266),  # Ok-Topk, Table 2
    "mobilenet_v2": (lambda: build("mobilenet_v2", (3, 224, 224), 1000), 3_504_872),
    "densenet121": (lambda: build("densenet121", (3, 224, 224), 1000), 7_978_856),
    "BERT but for the next sentence": (
        lambda: MaskedLanguageModel(30522, 512, dim=768, depth=12, num_heads=12),
        133_547_324 - 593_666,
    ),
    "Transformer and the biases of its attention": (
        lambda: TranslationModel(33_708, dim=512, depth=6, num_heads=8),
        61_362_176 + 18 * 4 * 512,
    ),
    "Deep Speech, the LSTM's": (SpeechRecognizer, 27_569_568),
}


@pytest.mark.parametrize("name", SIZES)
def test_networks_have_the_published_number_of_parameters(name: str) -> None:
    make, count = SIZES[name]
    with torch.device("meta"):
        net = make()
    assert sum(parameter.numel() for parameter in net.parameters()) == count


def cifar_files(per_file: int = 20) -> tuple[dict[str, bytes], Tensor, Tensor]:
    """The binary version's files, with few images in each; the classes and images of the first."""
    generator = torch.Generator().manual_seed(0)
    files = {}
    for name in ("test_batch", *(f"data_batch_{i}" for i in range(5, 0, -1))):
        classes = torch.randint(0, 10, (per_file,), generator=generator)
        pixels = torch.randint(0, 256, (per_file, 3, 32, 32), generator=generator)
        files[f"{name}.bin"] = b"".join(
            bytes([int(c)]) + bytes(image.flatten().tolist())
            for c, image in zip(classes, pixels, strict=True)
        )
    return files, classes, pixels


def write_cifar(folder: Path, files: dict[str, bytes]) -> str:
    """The archive as the University of Toronto packs it; its md5."""
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return hashlib.md5((folder / "cifar-10-binary.tar.gz").read_bytes()).hexdigest()


def test_cifar10_is_read_from_its_archive_and_from_its_folder(tmp_path: Path) -> None:
    files, classes, pixels = cifar_files()
    md5 = write_cifar(tmp_path, files)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "."):
        data = CIFAR10Data(str(tmp_path / path), augment=False, md5=md5)
        data.setup("fit")
        train = data.splits["train"]
        assert len(train) == 100  # type: ignore[arg-type]
        assert len(data.splits["test"]) == 20  # type: ignore[arg-type]
        images, found = zip(*(train[i] for i in range(20)), strict=True)
        assert list(found) == classes.tolist()
        mean = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
        std = torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
        assert torch.allclose(torch.stack(images), (pixels / 255 - mean) / std)


def test_cifar10_that_is_damaged_absent_or_another_is_refused(tmp_path: Path) -> None:
    files, _, _ = cifar_files(2)
    write_cifar(tmp_path, files)
    with pytest.raises(ValueError, match="c32a1d4ab5d03f1284b67883e8d87530"):
        CIFAR10Data(str(tmp_path / "cifar-10-binary.tar.gz")).setup("fit")
    with pytest.raises(FileNotFoundError, match="cifar-10-binary"):
        CIFAR10Data(str(tmp_path / "cifar.tar.gz")).setup("fit")
    for bad in (files["data_batch_1.bin"][:-1], b"\x0a" + files["data_batch_1.bin"][1:]):
        md5 = write_cifar(tmp_path, {**files, "data_batch_1.bin": bad})
        with pytest.raises(ValueError, match="3073"):
            CIFAR10Data(str(tmp_path / "cifar-10-binary.tar.gz"), md5=md5).setup("fit")


def write_images(root: Path, names: tuple[str, ...] = ("n01440764", "n01443537")) -> None:
    """One red image in the first class, two green ones in the second."""
    from PIL import Image

    for split in ("train", "val"):
        for number, name in enumerate(names):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(number + 1):
                color = [(255, 0, 0), (0, 255, 0)][number]
                Image.new("RGB", (60 + 40 * i, 50), color).save(folder / f"{name}_{i}.JPEG")
            (folder / "notes.txt").write_text("not an image")


def test_image_folder_is_read_as_imagenet_is_unpacked(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    write_images(tmp_path)
    data = ImageFolderData(str(tmp_path), image_size=24, batch_size=3, num_workers=0)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        ((images, classes),) = loader
        assert images.shape == (3, 3, 24, 24)
        assert sorted(classes.tolist()) == [0, 1, 1]
        for image, number in zip(images, classes, strict=True):
            red, green, _ = image.mean((1, 2))
            assert (red > 2 and green < -2) if number == 0 else (green > 2 and red < -2)


# ---- text ----
@pytest.mark.parametrize(("kind", "vocab_size"), [("words", NUM_SMALLEST), ("bpe", 300)])
def test_tokenizer_loses_nothing(kind: Any, vocab_size: int) -> None:
    if kind != "words":
        pytest.importorskip("tokenizers")
    text = "def größe(x):\n    return 'the the the'  # ✓ the end\n\tthe"
    tokenizer = tokenizer_of(kind, [text], vocab_size)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert NUM_SPECIAL <= min(tokens) <= max(tokens) < tokenizer.vocab_size <= vocab_size


def test_subwords_of_bert_are_pieces_in_lower_case(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    made = tokenizer_of("wordpiece", [read_corpus(None, 50_000)], 600)
    tokens = made.encode("Return the ARGUMENTS")
    assert tokens == made.encode("return the arguments")
    assert NUM_SPECIAL < min(tokens) <= max(tokens) < made.vocab_size <= 600
    with pytest.raises(ValueError, match="got cache=None: each rank would number"):
        TextData(tokenizer="wordpiece").setup("fit")
    with pytest.raises(ValueError, match="must be one of words, wordpiece, bpe, got 'bytes'"):
        TextData(tokenizer="bytes").setup("fit")  # type: ignore[arg-type]


@pytest.mark.parametrize("cached", [False, True])
def test_text_is_split_without_overlap(cached: bool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(chr(33 + i % 90) for i in range(1001)))
    cache = str(tmp_path / "cache") if cached else None
    data = TextData(str(tmp_path), seq_len=10, cache=cache)
    if cached:
        with pytest.raises(FileNotFoundError, match="that rank 0 has filled"):
            data.setup("fit")
        data.prepare_data()
        TextData(str(tmp_path), cache=cache).prepare_data()
        with pytest.raises(ValueError, match="name another folder"):
            TextData(str(tmp_path), vocab_size=300, cache=cache).prepare_data()
    data.setup("fit")
    sizes = {split: len(pieces) for split, pieces in data.splits.items()}  # type: ignore[arg-type]
    assert sizes == {"train": 90, "val": 5, "test": 5}
    text = [NUM_SPECIAL + 33 + i % 90 for i in range(1001)]
    assert data.splits["train"][0][0].tolist() == text[:11]
    assert data.splits["val"][0][0].tolist() == text[90:101]
    with pytest.raises(ValueError, match="seq_len"):
        TextData(str(tmp_path), seq_len=100).setup("fit")


def test_causal_model_sees_nothing_of_what_comes() -> None:
    model = CausalLanguageModel(seq_len=16, dim=32, num_heads=2).eval()
    tokens = torch.randint(0, 260, (2, 16))
    changed = tokens.clone()
    changed[:, 8:] = 7
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    assert first.shape == (2, 16, 260)
    assert torch.allclose(first[:, :8], second[:, :8], atol=1e-6)
    assert not torch.allclose(first[:, 8:], second[:, 8:], atol=1e-3)


def test_hidden_tokens_are_masked_replaced_or_left_as_in_bert() -> None:
    tokens = torch.full((100, 200), 200)
    places, given = hide(tokens, 260, torch.Generator().manual_seed(0))
    assert places.shape == (100, 30)
    assert all(len(row.unique()) == 30 for row in places)
    shown = given.gather(1, places)
    assert (shown == MASK).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == 200).float().mean() == pytest.approx(0.1, abs=0.02)
    assert shown[shown != MASK].min() >= NUM_SPECIAL
    untouched = given.scatter(1, places, 200)
    assert torch.equal(untouched, tokens)


LEARN: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, float]] = {
    "text": (
        lambda: CausalLanguageModel(seq_len=32, dim=32, num_heads=2, depth=1, lr=1e-2),
        lambda: TextData(seq_len=32, max_chars=20_000, batch_size=32),
        *("val_perplexity", 0.3),
    ),
    "masked text": (
        lambda: MaskedLanguageModel(seq_len=32, dim=32, num_heads=2, depth=1, lr=1e-2),
        lambda: TextData(seq_len=32, max_chars=20_000, batch_size=32),
        *("val_perplexity", 0.3),
    ),
    "translation": (
        lambda: TranslationModel(dim=32, depth=1, dropout=0.0, lr=1e-2, max_len=40),
        lambda: TranslationData(num_generated=600, batch_size=16),
        *("val_loss", 0.7),
    ),
    "speech": (
        lambda: SpeechRecognizer(24, depth=1, channels=2, lookahead=2, optimizer="adam", lr=1e-2),
        lambda: SpeechData(num_generated=64),
        *("val_loss", 0.5),
    ),
}
"""A model, its data, a metric, and what is at most left of the metric after three epochs."""


@some_now("task", LEARN, now=("text",))
def test_models_learn(task: str) -> None:
    L.seed_everything(0, verbose=False)
    make_model, make_data, metric, left = LEARN[task]
    model, data, run = make_model(), make_data(), trainer(max_epochs=3)
    run.validate(model, data, verbose=False)
    before = run.callback_metrics[metric]
    run.fit(model, data)
    assert run.callback_metrics[metric] < left * before
