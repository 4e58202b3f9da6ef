"""Speech recognition: convolutions, LSTMs and CTC, on AN4 or on audio of its form."""

from __future__ import annotations

import random
import re
import sys
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.text import WordErrorRate

from lightning_dsgd.tasks.base import SplitData, Task

LETTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""The letters of a transcript; the first one is CTC's blank."""
SAMPLE_RATE = 16_000
WINDOW, STRIDE = 320, 160
"""Samples of a spectrogram's window (20 ms), and from one window to the next (10 ms)."""
NUM_FREQUENCIES = WINDOW // 2 + 1

Utterance = tuple[Tensor, list[int]]
"""A spectrogram (NUM_FREQUENCIES, frames), and the letters spoken."""
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Spectrograms (n, NUM_FREQUENCIES, longest), their frames (n,), letters joined, their numbers."""


def spectrogram(samples: Tensor) -> Tensor:
    """Returns logarithms of the amplitudes, brought to mean 0 and variance 1."""
    window = torch.hamming_window(WINDOW)
    spectrum = torch.stft(samples, WINDOW, STRIDE, window=window, return_complex=True)
    amplitudes = spectrum.abs().log1p()
    return (amplitudes - amplitudes.mean()) / (amplitudes.std() + 1e-5)


def read_audio(file: Path) -> Tensor:
    """Returns samples in [-1, 1] of a NIST SPHERE file, or of raw 16-bit ones, low byte first."""
    content = file.read_bytes()
    low_first = True
    if content.startswith(b"NIST_1A"):
        size = int(content[8:16])
        fields = dict(
            re.findall(r"^(\S+) -\S+ (\S+)", content[:size].decode("ascii"), re.MULTILINE)
        )
        wanted = {"sample_rate": str(SAMPLE_RATE), "channel_count": "1", "sample_n_bytes": "2"}
        wanted["sample_coding"] = "pcm"
        found = {"sample_coding": "pcm", **fields}
        for name, value in wanted.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{name} of {file} must be {value}, got {found.get(name)}; convert it, for "
                    f"example with: sox IN -r {SAMPLE_RATE} -c 1 -b 16 -e signed OUT.sph"
                )
        low_first = fields.get("sample_byte_format") != "10"
        content = content[size:]
    samples = array("h", content[: len(content) // 2 * 2])
    if low_first != (sys.byteorder == "little"):
        samples.byteswap()
    if len(samples) < WINDOW:
        raise ValueError(f"{file} must hold at least {WINDOW} samples, got {len(samples)}")
    return torch.tensor(samples, dtype=torch.float32) / 2**15


def encode_letters(transcript: str) -> list[int]:
    """Returns the letters' places in `LETTERS`; other letters are left out."""
    return [LETTERS.index(c) for c in transcript.upper() if c in LETTERS[1:]]


class AN4(Dataset[Utterance]):
    """Loads a split of AN4 as CMU has it: etc/an4_SPLIT.{fileids,transcription} and wav/ID.sph."""

    def __init__(self, root: Path, split: str) -> None:
        self.files: list[Path] = []
        self.letters: list[list[int]] = []
        ids = _lines(root / "etc" / f"an4_{split}.fileids")
        transcripts = _lines(root / "etc" / f"an4_{split}.transcription")
        if len(ids) != len(transcripts):
            raise ValueError(
                f"an4_{split}.fileids and an4_{split}.transcription must have equally many lines, "
                f"got {len(ids)} and {len(transcripts)}"
            )
        for name, line in zip(ids, transcripts, strict=True):
            spoken = re.sub(r"</?s>|\(\S*\)\s*$", "", line)
            self.letters.append(encode_letters(" ".join(spoken.split())))
            candidates = [root / "wav" / f"{name}{suffix}" for suffix in (".sph", ".raw")]
            self.files.append(next((file for file in candidates if file.exists()), candidates[0]))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Utterance:
        return spectrogram(read_audio(self.files[index])), self.letters[index]


def _lines(file: Path) -> list[str]:
    if not file.exists():
        raise FileNotFoundError(
            f"AN4 must hold etc/{file.name}, got {file}, which does not exist; it is at "
            "http://www.speech.cs.cmu.edu/databases/an4"
        )
    return [line.strip() for line in file.read_text().splitlines() if line.strip()]


WORDS = ["ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "ZERO"]


def generated_utterances(num: int, seed: int) -> list[Utterance]:
    """Makes numbers, "spoken" with two tones a letter, 40 to 80 ms each, in noise; few are long."""
    draw = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    utterances = []
    for _ in range(num):
        words = [draw.choice(WORDS)]
        while len(words) < 6 and draw.random() < 0.5:
            words.append(draw.choice(WORDS))
        letters = encode_letters(" ".join(words))
        parts = []
        for letter in letters:
            t = torch.arange(draw.randint(640, 1280)) * (2 * torch.pi / SAMPLE_RATE)
            tones = torch.sin(300 * (1 + letter % 6) * t) + torch.sin(800 * (3 + letter // 6) * t)
            if LETTERS[letter] == " ":
                tones.zero_()
            # A gap after each letter: else two equal ones in a row would sound as one.
            parts += [tones, torch.zeros(320)]
        samples = torch.cat(parts)
        samples += 0.1 * torch.randn(len(samples), generator=noise)
        utterances.append((spectrogram(samples), letters))
    return utterances


def collate(utterances: list[Utterance]) -> Batch:
    """Pads the spectrograms at the end."""
    frames = torch.tensor([audio.shape[1] for audio, _ in utterances])
    padded = torch.zeros(len(utterances), NUM_FREQUENCIES, int(frames.max()))
    for row, (audio, _) in zip(padded, utterances, strict=True):
        row[:, : audio.shape[1]] = audio
    letters = torch.tensor([letter for _, spoken in utterances for letter in spoken])
    return padded, frames, letters, torch.tensor([len(spoken) for _, spoken in utterances])


class SpeechData(SplitData):
    """Loads AN4, whose test utterances serve to validate and to test, or audio of its form.

    Args:
        path: the folder `an4` with `etc` and `wav` (SPHERE files, or raw ones) in it; None for
            generated audio.
        num_generated: utterances to train on that are generated.
        batch_size: utterances a rank and step.
        num_workers: loader processes a rank.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self,
        path: str | None = None,
        num_generated: int = 1000,
        batch_size: int = 8,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.path = path
        self.num_generated = num_generated
        self.collate = collate

    def setup(self, stage: str) -> None:
        if self.path is None:
            train: Any = generated_utterances(self.num_generated, seed=0)
            val: Any = generated_utterances(max(1, self.num_generated // 10), seed=1)
        else:
            train, val = (AN4(Path(self.path), split) for split in ("train", "test"))
        self.splits = {"train": train, "val": val, "test": val}


class SpeechRecognizer(Task):
    """Trains Deep Speech 2 (https://arxiv.org/abs/1512.02595) with LSTMs in one direction, and CTC.

    Two convolutions over frequency and time, LSTMs with normalisation between them, a convolution
    that looks `lookahead` frames ahead, and a linear layer.  With the default sizes it has the
    27,569,568 parameters that the Ok-Topk paper gives for its LSTM.

    Args:
        hidden_size: the size of an LSTM's state.
        depth: number of LSTMs.
        channels: the channels of the convolutions.
        lookahead: frames that the last convolution sees ahead.
        lr: learning rate.
        momentum: the momentum of SGD.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        hidden_size: int = 800,
        depth: int = 5,
        channels: int = 32,
        lookahead: int = 20,
        lr: float = 1e-3,
        momentum: float = 0.9,
        **kwargs: Any,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, **kwargs)
        self.save_hyperparameters()
        self.convolutions = nn.ModuleList(
            nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.Hardtanh(0, 20))
            for convolution in (
                nn.Conv2d(1, channels, (41, 11), (2, 2), (20, 5)),
                nn.Conv2d(channels, channels, (21, 11), (2, 1), (10, 5)),
            )
        )
        sizes = [channels * (NUM_FREQUENCIES // 4 + 1)] + [hidden_size] * (depth - 1)
        self.lstms = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden_size) for _ in range(depth))
        self.lookahead = nn.Conv1d(
            hidden_size, hidden_size, lookahead + 1, groups=hidden_size, bias=False
        )
        self.head = nn.Linear(hidden_size, len(LETTERS), bias=False)
        self.val_wer = WordErrorRate()
        self.test_wer = WordErrorRate()

    def forward(self, audio: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities (longest, n, letters) of every other frame, and their numbers.

        Args:
            audio: spectrograms (n, NUM_FREQUENCIES, longest), padded.
            frames: how many frames of each utterance are no padding.
        """
        num = (frames - 1) // 2 + 1
        x = audio[:, None]
        for convolution in self.convolutions:
            x = convolution(x)
            heard = torch.arange(x.shape[3], device=x.device) < num[:, None]
            x = x * heard[:, None, None]
        x = x.flatten(1, 2).transpose(1, 2)
        # Padding stands at the end, and LSTMs look back: only what looks ahead must not see it.
        for lstm, norm in zip(self.lstms, self.norms, strict=True):
            x, _ = lstm(x)
            if norm is self.norms[-1]:
                x = (x * heard[..., None]).transpose(1, 2)
                x = nn.functional.pad(x, (0, self.lookahead.kernel_size[0] - 1))
                x = nn.functional.hardtanh(self.lookahead(x), 0, 20).transpose(1, 2)
            x = norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head(x).float().log_softmax(-1).transpose(0, 1), num

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        audio, frames, letters, num_letters = batch
        logits, num = self(audio, frames)
        # An utterance that is shorter than its transcript has no alignment, and no loss.
        loss = nn.functional.ctc_loss(logits, letters, num, num_letters, zero_infinity=True)
        return loss, logits, num

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _, _ = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_wer)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_wer)

    def predict_step(self, batch: Batch, batch_idx: int) -> list[str]:
        return transcripts(*self(batch[0], batch[1]))

    def _evaluate(self, split: str, batch: Batch, wer: WordErrorRate) -> None:
        loss, logits, num = self._loss(batch)
        _, _, letters, num_letters = batch
        spoken = [
            "".join(LETTERS[i] for i in row) for row in torch.split(letters, num_letters.tolist())
        ]
        wer.update(transcripts(logits, num), spoken)
        options: Any = {"on_epoch": True, "batch_size": len(batch[0])}
        self.log(f"{split}_loss", loss, sync_dist=True, **options)
        self.log(f"{split}_wer", wer, prog_bar=True, **options)


def transcripts(logits: Tensor, num: Tensor) -> list[str]:
    """Returns the most likely letter of each frame, without repetitions and blanks."""
    texts = []
    for row, length in zip(logits.argmax(-1).T, num.tolist(), strict=True):
        best = row[:length].unique_consecutive().tolist()
        texts.append("".join(LETTERS[i] for i in best if i > 0).strip())
    return texts
