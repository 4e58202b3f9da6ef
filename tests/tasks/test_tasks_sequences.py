"""Translation, speech, control and regression: true formats are read, and the models learn."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_dsgd.tasks.base import PopSGDSampler
from lightning_dsgd.tasks.control import RecurrentPPO, TMaze, Updates
from lightning_dsgd.tasks.regression import (
    LeastSquaresData,
    LinearRegression,
    YearPredictionData,
    least_squares,
)
from lightning_dsgd.tasks.speech import (
    LETTERS,
    SpeechData,
    SpeechRecognizer,
    collate,
    read_audio,
    spectrogram,
)
from lightning_dsgd.tasks.text import PAD
from lightning_dsgd.tasks.translation import (
    TranslationData,
    TranslationModel,
)
from tests.tasks.test_tasks import one_thread, trainer  # noqa: F401 - a fixture


# ---- translation ----
def write_parallel(folder: Path, num: int = 40) -> None:
    """A sentence a line, as in WMT's files; one holds a character that str.splitlines() ends at."""
    for split in ("train", "val", "test"):
        for language, word in (("en", "house"), ("de", "Häuser")):
            lines = [f"{word} {i}" for i in range(num)]
            lines[1] += "\u2028too"
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_parallel_text_files_are_read(tmp_path: Path) -> None:
    write_parallel(tmp_path)
    data = TranslationData(str(tmp_path), batch_size=10, vocab_size=300)
    data.setup("fit")
    texts = set()
    for source, target in data.train_dataloader():
        for ours, theirs in zip(source.tolist(), target.tolist(), strict=True):
            texts.add((data.tokenizer.decode(ours), data.tokenizer.decode(theirs)))
    assert len(texts) == 40
    assert ("house 7", "Häuser 7") in texts
    assert ("house 1\u2028too", "Häuser 1\u2028too") in texts
    (tmp_path / "val.de").write_text("one line\n")
    with pytest.raises(ValueError, match="40 and 1"):
        TranslationData(str(tmp_path)).setup("fit")
    (tmp_path / "val.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.de"):
        TranslationData(str(tmp_path)).setup("fit")
    with pytest.raises(ValueError, match="max_len=2"):
        TranslationData(max_len=2).setup("fit")


def test_decoder_sees_nothing_of_what_comes_and_no_padding() -> None:
    model = TranslationModel(300, dim=16, depth=1, num_heads=2).eval()
    source, target = torch.randint(4, 300, (2, 9)), torch.randint(4, 300, (2, 8))
    with torch.no_grad():
        whole = model(source, target)
        part = model(torch.nn.functional.pad(source, (0, 5), value=PAD), target[:, :3])
    assert whole.shape == (2, 8, 300)
    assert torch.allclose(whole[:, :3], part, atol=1e-5)


# ---- regression ----


def test_linear_regression_finds_the_minimum() -> None:
    data = LeastSquaresData(num_samples=512, num_features=4, batch_size=16)
    model = LinearRegression(num_features=4, lr=0.05)
    run = trainer(max_epochs=3)
    run.fit(model, data)
    a, b = least_squares(512, 4, dtype=torch.float32)
    best = (a @ torch.linalg.lstsq(a, b[:, None]).solution[:, 0] - b).square().mean()
    assert run.callback_metrics["val_mse"] == pytest.approx(float(best), rel=0.05)
    assert run.callback_metrics["val_loss"] == pytest.approx(float(best) / 2, rel=0.05)


def test_year_prediction_is_read_from_its_text_file(tmp_path: Path) -> None:
    a, b = least_squares(60, 90, dtype=torch.float32)
    rows = zip(a.tolist(), b.tolist(), strict=True)
    lines = [",".join([f"{1990 + y:.0f}", *(f"{x:.5f}" for x in row)]) for row, y in rows]
    file = tmp_path / "YearPredictionMSD.txt"
    file.write_text("\n".join(lines) + "\n")
    data = YearPredictionData(str(file), num_train=50)
    data.setup("fit")
    features, years = data.splits["train"].tensors  # type: ignore[attr-defined]
    assert features.shape == (50, 90)
    assert years.mean().abs() < 1e-5
    with pytest.raises(ValueError, match="num_train=463715"):
        YearPredictionData(str(file)).setup("fit")
    file.write_text(lines[0] + "\n" + lines[1] + ",7\n")
    with pytest.raises(ValueError, match=r"MSD\.txt:2 must hold 91 numbers, got 92"):
        YearPredictionData(str(file)).setup("fit")


# ---- PopSGD's partition ----
@pytest.mark.parametrize(("world_size", "mult"), [(1, 3), (4, 1), (5, 3)])
def test_every_sample_is_held_by_two_ranks_for_mult_passes(world_size: int, mult: int) -> None:
    dataset = TensorDataset(torch.arange(83))
    samplers = [PopSGDSampler(dataset, world_size, rank, mult) for rank in range(world_size)]
    seen = [list(sampler) for sampler in samplers]
    assert len({len(indices) for indices in seen}) == 1
    assert len(seen[0]) == len(samplers[0])
    holders: Counter[int] = Counter()
    for indices in seen:
        assert set(Counter(indices).values()) == {mult}
        holders.update(set(indices))
    assert set(holders.values()) == {min(2, world_size)}
    assert len(holders) == 83 - 83 % world_size
    size = len(seen[0]) // mult
    assert all(len(set(indices[:size])) == size for indices in seen)  # one pass after the other
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != seen[0]


# ---- speech ----
def sphere(samples: list[int], **fields: str) -> bytes:
    """A NIST SPHERE file as those of AN4."""
    lines = {
        "sample_count": f"-i {len(samples)}",
        "sample_rate": "-i 16000",
        "channel_count": "-i 1",
        "sample_byte_format": "-s2 01",
        "sample_n_bytes": "-i 2",
        "sample_sig_bits": "-i 16",
        **fields,
    }
    header = "NIST_1A\n   1024\n" + "".join(f"{k} {v}\n" for k, v in lines.items()) + "end_head\n"
    return header.encode().ljust(1024) + struct.pack(f"<{len(samples)}h", *samples)


def write_an4(root: Path, samples: list[int]) -> None:
    """As CMU packs it: the transcripts of the test split have no <s>, one file is raw."""
    (root / "etc").mkdir(parents=True)
    (root / "wav" / "an4_clstk" / "fash").mkdir(parents=True)
    names = ["an4_clstk/fash/an251-fash-b", "an4_clstk/fash/an253-fash-b"]
    spoken = {"train": "<s> {} </s> ({})", "test": "{} ({})"}
    for split, form in spoken.items():
        (root / "etc" / f"an4_{split}.fileids").write_text("\n".join(names) + "\n")
        texts = ("YES", "P I  T'S")
        lines = [
            form.format(text, name.split("/")[-1]) for text, name in zip(texts, names, strict=True)
        ]
        (root / "etc" / f"an4_{split}.transcription").write_text("\n".join(lines) + "\n")
    (root / "wav" / f"{names[0]}.sph").write_bytes(sphere(samples))
    (root / "wav" / f"{names[1]}.raw").write_bytes(struct.pack(f"<{len(samples)}h", *samples))


def test_an4_is_read_as_cmu_packs_it(tmp_path: Path) -> None:
    samples = torch.randint(-(2**15), 2**15, (4000,)).tolist()
    write_an4(tmp_path, samples)
    data = SpeechData(str(tmp_path), batch_size=2)
    data.setup("fit")
    expected = spectrogram(torch.tensor(samples) / 2**15)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        ((audio, frames, letters, num_letters),) = loader
        assert audio.shape == (2, 161, 26)
        assert frames.tolist() == [26, 26]
        assert torch.allclose(audio[0], expected, atol=1e-5)
        texts = {"".join(LETTERS[i] for i in row) for row in letters.split(num_letters.tolist())}
        assert texts == {"YES", "P I T'S"}
    file = next(tmp_path.rglob("*.sph"))
    for fields, text in (
        ({"sample_rate": "-i 8000"}, "sample_rate .* must be 16000, got 8000"),
        ({"sample_coding": "-s26 pcm,embedded-shorten-v2.00"}, "sample_coding"),
    ):
        file.write_bytes(sphere(samples, **fields))
        with pytest.raises(ValueError, match=text):
            read_audio(file)


def test_padding_changes_nothing_of_what_is_heard() -> None:
    model = SpeechRecognizer(hidden_size=8, depth=2, channels=2, lookahead=2).eval()
    audio = torch.randn(161, 30)
    longer = collate([(audio, [1]), (torch.randn(161, 50), [2])])
    with torch.no_grad():
        alone, num = model(audio[None], torch.tensor([30]))
        padded, both = model(longer[0], longer[1])
    assert num.tolist() == [15]
    assert both.tolist() == [15, 25]
    assert torch.allclose(alone[:, 0], padded[:15, 0], atol=1e-5)


# ---- control ----
def test_the_signal_is_seen_at_the_start_alone() -> None:
    maze = TMaze()
    seen, _ = maze.reset(seed=0)
    assert seen == [maze.signal, 0, 1]
    for place in range(1, maze.length + 1):
        seen, *_ = maze.step(0)
        assert seen == [0, place == maze.length, 1]


@pytest.mark.exhaustive
def test_policy_learns_to_walk_to_the_end() -> None:
    L.seed_everything(0, verbose=False)
    model = RecurrentPPO(num_episodes=16, lr=1e-2)
    run = trainer()
    run.validate(model, Updates(), verbose=False)
    run.fit(model, Updates(60))
    assert run.global_step == 240
    assert run.callback_metrics["val_return"] >= -0.5  # a turn before the end always gives -1
    assert "episode_steps" in run.callback_metrics
