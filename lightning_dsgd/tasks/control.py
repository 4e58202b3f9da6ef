"""PPO with a recurrent policy, on episodes of unequal length: collecting them takes unequal time.

What an environment is, is Gymnasium's: `reset(seed=...)` gives (observation, info), `step(action)`
gives (observation, reward, terminated, truncated, info).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dsgd.tasks.base import Task

State = tuple[Tensor, Tensor]
"""The state of an LSTM."""


class TMaze:
    """A corridor at whose end the signal shown at its start tells the way (Bakker, NeurIPS 2001).

    The observation is (signal, is this the end of the corridor, 1); the signal, 1 or -1, is 0 but
    in the first place.  The actions are forward, left and right.  A turn ends the episode: at
    the end and in the right way it is worth 1, else -1, and so is to take twice the steps that it
    takes.  A corridor has from 2 to `max_length` places,
    its length drawn so that all orders of magnitude are equally likely.

    Args:
        max_length: places of the longest corridor.
    """

    num_observed = 3
    num_actions = 3

    def __init__(self, max_length: int = 32) -> None:
        self.max_length = max_length
        self._draw = random.Random(0)

    def reset(self, *, seed: int | None = None) -> tuple[list[float], dict[str, Any]]:
        """Begins an episode."""
        if seed is not None:
            self._draw = random.Random(seed)
        self.length = round(2 * (self.max_length / 2) ** self._draw.random())
        self.signal = self._draw.choice((-1, 1))
        self.place = self.num_steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[list[float], float, bool, bool, dict[str, Any]]:
        """Goes forward (0), left (1) or right (2)."""
        self.num_steps += 1
        at_end = self.place == self.length
        if action == 0:
            self.place = min(self.place + 1, self.length)
            too_long = self.num_steps >= 2 * self.length + 2
            return self._observe(), -1.0 if too_long else 0.0, too_long, False, {}
        right_way = at_end and (action == 1) == (self.signal == -1)
        return self._observe(), 1.0 if right_way else -1.0, True, False, {}

    def _observe(self) -> list[float]:
        signal = self.signal if self.place == 0 and self.num_steps == 0 else 0
        return [float(signal), float(self.place == self.length), 1.0]


def make_environment(name: str) -> tuple[Any, int, int]:
    """Makes an environment; returns it, its observations' size and its number of actions.

    Args:
        name: "t-maze", or the name of an environment of Gymnasium with discrete actions.
    """
    if name == "t-maze":
        return TMaze(), TMaze.num_observed, TMaze.num_actions
    try:
        import gymnasium
    except ImportError as err:
        raise ImportError(
            f"environment={name!r} needs Gymnasium, which is not installed; "
            "try: pip install gymnasium, or environment='t-maze'"
        ) from err
    environment = gymnasium.make(name)
    space, actions = environment.observation_space, environment.action_space
    if not isinstance(space, gymnasium.spaces.Box) or not isinstance(
        actions, gymnasium.spaces.Discrete
    ):
        raise ValueError(
            f"the observations of an environment must be arrays and its actions discrete, got "
            f"{space} and {actions} with environment={name!r}; try 'CartPole-v1'"
        )
    return environment, int(torch.tensor(space.shape).prod()), int(actions.n)


@dataclass
class Episodes:
    """Holds episodes side by side, each tensor (episodes, steps of the longest, ...)."""

    observed: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    running: Tensor
    """1 where an episode had not ended, else 0."""

    def advantages(self, discount: float, smoothing: float) -> Tensor:
        """Returns generalised advantage estimates, https://arxiv.org/abs/1506.02438."""
        advantages = torch.zeros_like(self.rewards)
        ahead = next_value = torch.zeros(len(self.rewards))
        for t in reversed(range(self.rewards.shape[1])):
            surprise = self.rewards[:, t] + discount * next_value - self.values[:, t]
            ahead = (surprise + discount * smoothing * ahead) * self.running[:, t]
            advantages[:, t] = ahead
            next_value = self.values[:, t] * self.running[:, t]
        return advantages


class RecurrentPPO(Task):
    """Proximal policy optimisation (https://arxiv.org/abs/1707.06347) of an LSTM.

    A training step collects whole episodes side by side, which lasts as long as the longest one,
    and then descends `num_passes` times on all of them.  An episode that the environment cuts off
    counts as ended.  Every rank draws its own episodes.

    Args:
        environment: "t-maze", or the name of one of Gymnasium's (extra `control`).
        num_episodes: episodes that a rank collects in a training step.
        max_steps: the number of steps after which an episode is cut off.
        num_passes: optimizer steps for each training step.
        hidden_size: the size of the LSTM's state.
        depth: layers of the LSTM.
        discount: the factor of a reward that comes a step later.
        smoothing: the lambda of generalised advantage estimation.
        clip: how far the ratio of new to old probability counts.
        value_weight: the weight of the values' loss.
        entropy_weight: the weight of the bonus for entropy.
        max_grad_norm: the norm to which gradients are clipped.
        num_eval_episodes: episodes that a rank runs to evaluate.
        seed: the seed of the episodes; each rank adds its own number.
        optimizer: "sgd", "adam" or "adamw".
        lr: learning rate.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        environment: str = "t-maze",
        num_episodes: int = 16,
        max_steps: int = 500,
        num_passes: int = 4,
        hidden_size: int = 32,
        depth: int = 1,
        discount: float = 0.99,
        smoothing: float = 0.95,
        clip: float = 0.2,
        value_weight: float = 0.5,
        entropy_weight: float = 0.01,
        max_grad_norm: float = 0.5,
        num_eval_episodes: int = 32,
        seed: int = 0,
        optimizer: Literal["sgd", "adam", "adamw"] = "adam",
        lr: float = 3e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, lr=lr, **kwargs)
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.environment = environment
        self.num_episodes = num_episodes
        self.max_steps = max_steps
        self.num_passes = num_passes
        self.discount = discount
        self.smoothing = smoothing
        self.clip = clip
        self.value_weight = value_weight
        self.entropy_weight = entropy_weight
        self.max_grad_norm = max_grad_norm
        self.num_eval_episodes = num_eval_episodes
        self.seed = seed
        first, num_observed, num_actions = make_environment(environment)
        self.environments = [first]
        self.encoder = nn.Sequential(nn.Linear(num_observed, hidden_size), nn.Tanh())
        self.lstm = nn.LSTM(hidden_size, hidden_size, depth, batch_first=True)
        self.policy = nn.Linear(hidden_size, num_actions)
        self.value = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.policy.weight)
        self.val_return = MeanMetric()
        self.test_return = MeanMetric()

    def forward(self, observed: Tensor, state: State | None = None) -> tuple[Tensor, Tensor, State]:
        """Returns logits of the actions, values, and the LSTM's state, after (n, steps, ...)."""
        hidden, state = self.lstm(self.encoder(observed), state)
        return self.policy(hidden), self.value(hidden)[..., 0], state

    @torch.no_grad()
    def collect(self, num_episodes: int, seed: int, *, greedy: bool = False) -> Episodes:
        """Runs whole episodes with the policy as it is.

        Args:
            num_episodes: how many episodes run side by side.
            seed: the seed of the environments and of the actions.
            greedy: whether the likeliest action is taken, instead of a drawn one.
        """
        while len(self.environments) < num_episodes:
            self.environments.append(make_environment(self.environment)[0])
        environments = self.environments[:num_episodes]
        generator = torch.Generator().manual_seed(seed)
        observed = [
            environment.reset(seed=(seed * num_episodes + i) % 2**31)[0]
            for i, environment in enumerate(environments)
        ]
        running = [True] * num_episodes
        state: State | None = None
        columns: list[tuple[Tensor, ...]] = []
        while any(running) and len(columns) < self.max_steps:
            x = torch.stack([torch.as_tensor(o, dtype=torch.float32).flatten() for o in observed])
            logits, values, state = self(x[:, None].to(self.device), state)
            log_probs = logits[:, 0].float().log_softmax(-1).cpu()
            actions = (
                log_probs.argmax(-1)
                if greedy
                else log_probs.exp().multinomial(1, generator=generator)[:, 0]
            )
            was_running, rewards = torch.tensor(running, dtype=torch.float32), []
            for i, environment in enumerate(environments):
                reward = 0.0
                if running[i]:
                    observed[i], reward, ended, cut_off, _ = environment.step(int(actions[i]))
                    running[i] = not (ended or cut_off)
                rewards.append(float(reward))
            chosen = log_probs.gather(1, actions[:, None])[:, 0]
            values = values[:, 0].float().cpu()
            columns.append((x, actions, chosen, values, torch.tensor(rewards), was_running))
        return Episodes(*(torch.stack(column, 1) for column in zip(*columns, strict=True)))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        # Counts on across epochs and resumed runs.
        update = self.trainer.global_step // self.num_passes
        seed = self.seed + update * self.trainer.world_size + self.global_rank
        episodes = self.collect(self.num_episodes, seed)
        advantages = episodes.advantages(self.discount, self.smoothing)
        running = episodes.running.to(self.device)
        returns = (advantages + episodes.values).to(self.device)
        seen = advantages[episodes.running > 0]
        advantages = ((advantages - seen.mean()) / (seen.std(correction=0) + 1e-8)).to(self.device)
        observed, actions = episodes.observed.to(self.device), episodes.actions.to(self.device)
        old_log_probs = episodes.log_probs.to(self.device)

        def mean(x: Tensor) -> Tensor:
            return (x * running).sum() / running.sum()

        for _ in range(self.num_passes):
            logits, values, _ = self(observed)
            log_probs = logits.log_softmax(-1)
            ratio = (log_probs.gather(2, actions[..., None])[..., 0] - old_log_probs).exp()
            clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
            gain = mean(torch.minimum(ratio * advantages, clipped * advantages))
            entropy = mean(-(log_probs.exp() * log_probs).sum(-1))
            error = mean((values - returns) ** 2)
            loss = self.value_weight * error - gain - self.entropy_weight * entropy
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, self.max_grad_norm, "norm")
            optimizer.step()
        schedule: Any = self.lr_schedulers()
        if schedule is not None:
            schedule.step()
        self.log("train_return", episodes.rewards.sum(1).mean(), prog_bar=True, batch_size=1)
        self.log("train_loss", loss, batch_size=1)
        self.log("episode_steps", float(episodes.running.shape[1]), batch_size=1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("val", 2**29, self.val_return)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("test", 2**30, self.test_return)

    def _evaluate(self, split: str, seed: int, mean: MeanMetric) -> None:
        episodes = self.collect(self.num_eval_episodes, seed + self.global_rank, greedy=True)
        mean.update(episodes.rewards.sum(1))
        self.log(f"{split}_return", mean, on_epoch=True, prog_bar=True, batch_size=1)


class Updates(LightningDataModule):
    """Holds no data: says how many training steps an epoch has, on each rank.

    Args:
        num_updates: training steps of an epoch.
    """

    def __init__(self, num_updates: int = 50) -> None:
        super().__init__()
        self.num_updates = num_updates

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.num_updates)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(1)

    def _loader(self, num: int) -> DataLoader[Any]:
        # Lightning deals the numbers out to the ranks.
        world_size = self.trainer.world_size if self.trainer else 1
        numbers: Any = range(num * world_size)
        return DataLoader(numbers, batch_size=None)
