"""Translation, speech, control and regression: true formats are read, and the models learn."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_dsgd.tasks.base import SplitData
from lightning_dsgd.tasks.control import Episodes, RecurrentPPO, TMaze, Updates
from lightning_dsgd.tasks.partition import PopSGDSampler
from lightning_dsgd.tasks.regression import (
    GisetteData,
    LeastSquaresData,
    LinearRegression,
    LogisticRegression,
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
from lightning_dsgd.tasks.text import BEGIN, END, PAD
from lightning_dsgd.tasks.translation import (
    Buckets,
    TranslationData,
    TranslationModel,
)
from tests.support.worlds import FitWorld
from tests.tasks.test_tasks import num_parameters, one_thread, trainer  # noqa: F401 - a fixture


# ---- translation ----
def test_transformer_has_the_papers_parameters_and_the_biases_of_its_attention() -> None:
    with torch.device("meta"):
        model = TranslationModel(33_708, dim=512, depth=6, num_heads=8)
    assert num_parameters(model) == 61_362_176 + 18 * 4 * 512


def test_batches_hold_sentences_of_about_one_length() -> None:
    pairs = [([9] * (1 + i * 7 % 40), [8] * (1 + i * 3 % 5)) for i in range(100)]
    batches = Buckets(pairs, 16, drop_last=False)
    assert sum(len(source) for source, _ in batches) == 100
    assert len(Buckets(pairs, 16, drop_last=True)) == 6
    for source, target in batches:
        assert (source == END).sum(1).eq(1).all()
        assert (target[:, 0] == BEGIN).all()
        assert (source != PAD).float().mean() > 0.5
    assert batches[0][0].shape[1] < 10 < 40 < batches[-1][0].shape[1]


def write_parallel(folder: Path, num: int = 40) -> None:
    """A sentence a line, as in WMT's files; one holds a character that str.splitlines() ends at."""
    for split in ("train", "val", "test"):
        for language, word in (("en", "house"), ("de", "Häuser")):
            lines = [f"{word} {i}" for i in range(num)]
            lines[1] += "\u2028too"
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_parallel_text_files_are_read(kind: Any, tmp_path: Path) -> None:
    if kind != "words":
        pytest.importorskip("tokenizers")
    write_parallel(tmp_path)
    data = TranslationData(str(tmp_path), batch_size=10, vocab_size=300, tokenizer=kind)
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


@pytest.mark.exhaustive
def test_transformer_learns_to_translate() -> None:
    L.seed_everything(0, verbose=False)
    data = TranslationData(num_generated=600, batch_size=16)
    options: Any = {"warmup": 20, "decay": "inverse_sqrt", "schedule_unit": "step"}
    model = TranslationModel(dim=32, depth=1, dropout=0.0, lr=1e-2, max_len=40, **options)
    run = trainer(max_epochs=3, check_val_every_n_epoch=3)
    run.fit(model, data)
    assert run.callback_metrics["val_loss"] < 4.5  # a guess has 6.2
    assert 0 <= run.callback_metrics["val_bleu"] <= 1
    (texts, *_) = run.predict(model, data) or []
    assert all(isinstance(text, str) for text in texts)


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
    assert features.std(0) == pytest.approx(torch.ones(90), abs=1e-4)
    assert len(data.splits["test"]) == 10  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_train=463715"):
        YearPredictionData(str(file)).setup("fit")
    file.write_text(lines[0] + "\n" + lines[1] + ",7\n")
    with pytest.raises(ValueError, match=r"MSD\.txt:2 must hold 91 numbers, got 92"):
        YearPredictionData(str(file)).setup("fit")
    with pytest.raises(FileNotFoundError, match="none"):
        YearPredictionData(str(tmp_path / "none")).setup("fit")


def test_gisette_is_read_from_its_text_files(tmp_path: Path) -> None:
    for split, num in (("train", 4), ("valid", 2)):
        row = " ".join(["999", *["0"] * 4998, "333"]) + " \n"  # a blank at the end, as published
        (tmp_path / f"gisette_{split}.data").write_text(row * num)
        (tmp_path / f"gisette_{split}.labels").write_text("1\n-1\n" * (num // 2))
    data = GisetteData(str(tmp_path))
    data.setup("fit")
    features, classes = data.splits["train"].tensors  # type: ignore[attr-defined]
    assert features.shape == (4, 5000)
    assert features[0, [0, 1, -1]].tolist() == pytest.approx([1, 0, 1 / 3])
    assert classes.tolist() == [1, 0, 1, 0]
    assert len(data.splits["val"]) == 2  # type: ignore[arg-type]
    (tmp_path / "gisette_valid.labels").write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"gisette_valid\.labels"):
        GisetteData(str(tmp_path)).setup("fit")


def test_logistic_regression_learns() -> None:
    run = trainer(max_epochs=2)
    run.fit(LogisticRegression(), GisetteData())
    assert run.callback_metrics["val_accuracy"] > 0.9


# ---- PopSGD's partition ----
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("mult", [1, 3])
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
    if world_size == 4:
        assert set(seen[0]) == set(seen[1])
        assert not set(seen[0]) & set(seen[2])
        assert seen[0] != seen[1]
    size = len(seen[0]) // mult
    assert all(len(set(indices[:size])) == size for indices in seen)  # one pass after the other
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != seen[0]


class Indices(SplitData):
    def setup(self, stage: str) -> None:
        self.splits = dict.fromkeys(("train", "val"), TensorDataset(torch.arange(20.0)))


class Recorder(LinearRegression):
    def __init__(self) -> None:
        super().__init__(1)
        self.epochs: dict[int, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epochs.setdefault(self.current_epoch, []).extend(batch[0].tolist())
        return self.net(batch[0][:, None]).sum() * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def record(strategy: str) -> dict[int, list[float]]:
    model = Recorder()
    run = trainer(devices=2, strategy=strategy, max_epochs=2)
    run.fit(model, Indices(batch_size=5, mult=2))
    return model.epochs


def test_a_fit_deals_the_data_out_so_and_anew_in_every_epoch() -> None:
    first, second = FitWorld().run(2, record, "popsgd")
    for epochs in (first, second):
        assert set(epochs) == {0, 1}
        assert all(sorted(seen) == sorted(2 * list(range(20))) for seen in epochs.values())
        assert epochs[0] != epochs[1]
    assert first[0] != second[0]


# ---- speech ----
def test_deep_speech_has_the_parameters_of_the_papers_lstm() -> None:
    with torch.device("meta"):
        assert num_parameters(SpeechRecognizer()) == 27_569_568


def sphere(samples: list[int], byte_format: str = "01", **fields: str) -> bytes:
    """A NIST SPHERE file as those of AN4."""
    lines = {
        "sample_count": f"-i {len(samples)}",
        "sample_rate": "-i 16000",
        "channel_count": "-i 1",
        "sample_byte_format": f"-s2 {byte_format}",
        "sample_n_bytes": "-i 2",
        "sample_sig_bits": "-i 16",
        **fields,
    }
    header = "NIST_1A\n   1024\n" + "".join(f"{k} {v}\n" for k, v in lines.items()) + "end_head\n"
    order = "<" if byte_format == "01" else ">"
    return header.encode().ljust(1024) + struct.pack(f"{order}{len(samples)}h", *samples)


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


def test_audio_of_another_form_is_refused(tmp_path: Path) -> None:
    samples = list(range(-200, 200))
    file = tmp_path / "audio.sph"
    expected = torch.tensor(samples) / 2**15
    for byte_format in ("01", "10"):
        file.write_bytes(sphere(samples, byte_format))
        assert torch.equal(read_audio(file), expected)
    for fields, text in (
        ({"sample_rate": "-i 8000"}, "sample_rate .* must be 16000, got 8000"),
        ({"sample_coding": "-s26 pcm,embedded-shorten-v2.00"}, "sample_coding"),
    ):
        file.write_bytes(sphere(samples, **fields))
        with pytest.raises(ValueError, match=text):
            read_audio(file)
    file.write_bytes(sphere(samples[:10]))
    with pytest.raises(ValueError, match="got 10"):
        read_audio(file)
    with pytest.raises(FileNotFoundError, match=r"an4_train\.fileids"):
        SpeechData(str(tmp_path)).setup("fit")


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


@pytest.mark.exhaustive
def test_speech_recogniser_learns() -> None:
    L.seed_everything(0, verbose=False)
    model = SpeechRecognizer(24, depth=1, channels=2, lookahead=2, optimizer="adam", lr=1e-2)
    run, data = trainer(max_epochs=3), SpeechData(num_generated=64)
    run.validate(model, data, verbose=False)
    before = run.callback_metrics["val_loss"]
    run.fit(model, data)
    assert run.callback_metrics["val_loss"] < 0.5 * before
    assert 0 <= run.callback_metrics["val_wer"] <= 1.5


# ---- control ----
def test_maze_rewards_the_turn_that_was_signalled_at_its_start() -> None:
    maze = TMaze(8)
    lengths = set()
    for seed in range(30):
        (signal, _, _), _ = maze.reset(seed=seed)
        assert signal in (-1, 1)
        lengths.add(maze.length)
        for _ in range(maze.length):
            (hidden, at_end, _), reward, ended, cut_off, _ = maze.step(0)
            assert (hidden, reward, ended, cut_off) == (0, 0, False, False)
        assert at_end == 1
        right_way = 1 if signal == -1 else 2
        assert maze.step(right_way if seed % 2 else 3 - right_way)[1:3] == (
            1.0 if seed % 2 else -1.0,
            True,
        )
    assert min(lengths) == 2
    assert max(lengths) == 8
    maze.reset()
    assert maze.step(1)[1:3] == (-1.0, True)
    maze.reset()
    steps = [maze.step(0)[1:3] for _ in range(2 * maze.length + 2)]
    assert steps[-1] == (-1.0, True)
    assert not any(ended for _, ended in steps[:-1])


def test_advantages_are_those_of_each_episode_alone() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    running = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    none = torch.zeros(2, 3)
    found = Episodes(none, none, none, values, rewards, running).advantages(0.5, 0.5)
    third = 1 - 4
    second = 0.5 * 4 - 2 + 0.25 * third
    assert found[0].tolist() == pytest.approx([0.5 * 2 - 1 + 0.25 * second, second, third])
    assert found[1].tolist() == pytest.approx([0.5 * 16 - 8 + 0.25 * (3 - 16), 3 - 16, 0])


def test_episodes_end_apart_and_are_drawn_by_their_seed() -> None:
    model = RecurrentPPO()
    first, again, other = (model.collect(6, seed) for seed in (3, 3, 4))
    assert torch.equal(first.observed, again.observed)
    assert torch.equal(first.actions, again.actions)
    assert first.actions.shape != other.actions.shape or not torch.equal(
        first.actions, other.actions
    )
    steps = first.running.sum(1)
    assert steps.max() == first.running.shape[1]
    assert len(steps.unique()) > 1
    assert (first.rewards * (1 - first.running) == 0).all()
    assert first.rewards.sum(1).abs().eq(1).all()
    # The policy as a whole sees what it saw step by step.
    with torch.no_grad():
        logits, values, _ = model(first.observed)
    chosen = logits.log_softmax(-1).gather(2, first.actions[..., None])[..., 0]
    assert torch.allclose(chosen, first.log_probs, atol=1e-5)
    assert torch.allclose(values, first.values, atol=1e-5)


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
