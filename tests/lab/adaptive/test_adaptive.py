"""`adaptive` trains and changes: with simulated ranks, and with real ones."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_dsgd
from benchmarks.compare.situations import SITUATIONS, Situation
from lightning_dsgd import Adaptive
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.elastic.suits import check_survival
from lightning_dsgd.lab.adaptive.prediction import ROUNDED
from lightning_dsgd.lab.epochs import Epochs
from lightning_dsgd.lab.simulate.model import passes
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.fits import Plain
from tests.support.models import loader, trainer, weights
from tests.support.rank import Rank
from tests.support.thorough import tries
from tests.support.worlds import FitWorld

NUM, EPOCH = 64, 32

# ---- simulated ranks ----


class Watched(Adaptive):
    """Notes at which step it changes, and the weights that all begin with."""

    def _change(self, x: torch.Tensor) -> None:
        super()._change(x)
        self.__dict__.setdefault("changes", []).append((self.inner.name, x.clone()))


def train(net: Any, situations: list[Situation], seed: int, dealt: Epochs) -> Any:
    """Half of the epochs in each situation, with saves after some of them."""
    claims = dealt.is_claimed
    algorithm, x = Watched(epoch_steps=EPOCH), torch.zeros(NUM)
    counts = torch.ones(1, dtype=torch.int64)
    algorithm.start(net, x, Conditions(claims_batches=claims, gradient_counts=counts))
    num_own, g = 0, torch.zeros(NUM)
    for batch in dealt.batches(net.rank):
        if batch is None:
            algorithm.settle(x)
            if seed % 2:
                algorithm.settle(x)  # a validation, a save
            continue
        place = min(len(situations) - 1, dealt.step_of(batch) // (2 * EPOCH))
        seconds = situations[place].step_s(seed, num_own, net.rank)
        for pass_s, begin in passes(algorithm, NUM, seconds):
            net.compute(pass_s)
            if algorithm.traits.takes_pieces:
                algorithm.gradient_made(g.fill_(1.0 + net.rank), begin)
        uses = algorithm.traits.uses_gradient
        algorithm.before_update(x, g.fill_(1.0 + net.rank) if uses else g[:0])
        x -= g if uses else 1.0 + net.rank
        algorithm.after_update(x)
        num_own += 1
    algorithm.settle(x)
    end_s = net.now()
    algorithm.finish(x)
    changes = vars(algorithm).get("changes", [])
    return end_s, x, changes, algorithm.decisions, num_own


def trained(situations: list[Situation], seed: int, claims: bool) -> list[Any]:
    link = 2 * 4 * NUM * 7 / 8 / situations[0].allreduce_s
    num_steps = 2 * EPOCH * len(situations)
    dealt = Epochs(num_steps, 8, EPOCH, "claimed" if claims else "equal")
    return SimulatedWorld(8, 1e-3, link, timeout_s=math.inf).run(train, situations, seed, dealt)


ALIKE = Situation("nobody is late")
SLOW, RANDOM, TAIL = (SITUATIONS[name] for name in ("slow-rank", "random", "heavy-tail"))


@pytest.mark.parametrize("seed", tries(40, 2))
@pytest.mark.parametrize("claims", [False, True])
def test_all_ranks_change_together_and_begin_with_the_same_weights(seed: int, claims: bool) -> None:
    draw = random.Random(seed)
    situations = [draw.choice([ALIKE, SLOW, RANDOM, TAIL]) for _ in range(2)]
    ranks = trained(situations, seed, claims)
    _, x, changes, decisions, _ = ranks[0]
    assert decisions
    for _, other, theirs, said, num_own in ranks:
        assert torch.equal(other, x)
        assert [name for name, _ in theirs] == [name for name, _ in changes]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(theirs, changes, strict=True))
        assert [text.split(": ", 1)[1] for text in said] == [t.split(": ", 1)[1] for t in decisions]
        if not claims:
            assert said == decisions
            assert num_own == 2 * 2 * EPOCH
    assert sum(rank[4] for rank in ranks) == 8 * 2 * 2 * EPOCH
    assert len(changes) <= 3


def test_ranks_alike_lose_nothing_and_a_slow_rank_is_seen() -> None:
    [(end_s, *_), *_] = ranks = trained([ALIKE], 0, claims=False)
    assert [rank[2] for rank in ranks] == [[]] * 8
    steps = [max(ALIKE.step_s(0, step, rank) for rank in range(8)) for step in range(2 * EPOCH)]
    assert end_s < 1.03 * (sum(steps) + 2 * EPOCH * ALIKE.allreduce_s)
    ranks = trained([ALIKE, SLOW], 0, claims=True)
    assert [name for name, _ in ranks[0][2]] == ["wagma"]
    assert ranks[7][4] < 0.9 * ranks[0][4], "the slow rank makes fewer steps"
    fixed = 2 * EPOCH * (1.03 + 2.06)
    assert ranks[0][0] < 0.85 * fixed


def resumed(net: Any, choice: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after ten steps straight through, and after a save between them."""

    def step(rank: Rank, number: int) -> None:
        g = torch.full((NUM,), 1.0 + net.rank + number)
        if rank.algorithm.traits.uses_gradient:
            rank.descend(g, lr=0.1)
        else:
            rank.step(-0.1 * g)

    ends = []
    for saves in (False, True):
        counts = torch.ones(1, dtype=torch.int64)
        conditions = Conditions(gradient_counts=counts)
        rank = Rank(net.sub(f"{saves}"), Adaptive(), torch.zeros(NUM), conditions)
        state = rank.algorithm.state_dict() | {"choice": choice, "decisions": ["step 1: takes it"]}
        fresh = make_algorithm(choice)
        fresh.start(net.sub(f"fresh {saves}"), rank.x.clone(), conditions)
        fresh.settle(rank.x)
        rank.algorithm.load_state_dict(state | {"inner": fresh.state_dict()})
        fresh.stop()
        assert rank.algorithm.inner.name == choice.partition(":")[0]
        for number in range(10):
            step(rank, number)
            rank.settle()
            if saves and number == 4:
                rank.resume(Adaptive())
                assert rank.algorithm.decisions == ["step 1: takes it"]
        ends.append(rank.finish().clone())
    return ends[0], ends[1]


WITH_STATE = "hpsgd:max_local_steps=2:outer_lr=0.5:outer_momentum=0.5"


@pytest.mark.parametrize("choice", [ROUNDED, WITH_STATE])
def test_a_resume_goes_on_with_what_was_in_force(choice: str) -> None:
    for straight, again in SimulatedWorld(4, 1e-3, 1e9).run(resumed, choice):
        torch.testing.assert_close(again, straight, rtol=0, atol=1e-6)


# ---- real ranks ----


class Late(Plain):
    """Its last rank is slow until a given step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_late = self.global_rank == self.trainer.world_size - 1
        time.sleep(0.02 if is_late else 0.004)  # the computation
        return super().training_step(batch, batch_idx)


def fit(folder: str, resume: str | None = None) -> Any:
    strategy = lightning_dsgd.AdaptiveStrategy(timeout_s=60.0, data="claimed")
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    epochs = 2 if resume is None else 3
    fitter = trainer(strategy, 4, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True)
    module = Late()
    fitter.fit(module, loader(4 * 8 * 30), loader(64), ckpt_path=resume)
    return weights(module), strategy.decisions, fitter.global_step


def reasons(decisions: list[str]) -> list[str]:
    return [text.split(": ", 1)[1] for text in decisions]  # ranks that claim count steps each


def test_a_slow_rank_is_seen_and_a_resume_goes_on(tmp_path: Path) -> None:
    ranks = FitWorld().run(4, fit, str(tmp_path))
    assert any("takes wagma:overlap=true:group_size=4: " in text for text in ranks[0][1])
    assert all(reasons(decisions) == reasons(ranks[0][1]) for _, decisions, _ in ranks)
    assert all(torch.equal(own, ranks[0][0]) for own, _, _ in ranks)
    steps = [num for _, _, num in ranks]
    assert sum(steps) == 4 * 30 * 2
    assert steps[3] < max(steps[:3])
    saved = tmp_path / "epoch=1.ckpt"
    own = torch.load(f"{saved}.replicas/rank_00003.pt", weights_only=True)
    [state] = own["lightning_dsgd"]["algorithms"]
    said = ranks[3][1]
    assert state["decisions"] == said
    assert f" {state['choice']}: " in said[-1]
    again = FitWorld().run(4, fit, str(tmp_path), str(saved))
    assert again[3][1][: len(said)] == said
    assert sum(num for _, _, num in again) == 4 * 30 * 3


def test_what_it_cannot_honour_is_refused() -> None:
    with pytest.raises(ValueError, match="a loss would break off"):
        check_survival(Adaptive(), 4, None, torch.device("cpu"))
    with pytest.raises(ValueError, match='with strategy="adaptive"'):
        lightning_dsgd.AdaptiveStrategy(weigh_by="samples")
    with pytest.raises(ValueError, match="bf16-mixed"):
        Adaptive().check(4, Conditions(skips_overflow=True))
