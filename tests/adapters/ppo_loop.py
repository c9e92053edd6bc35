"""Proximal policy optimisation in one file, as people write it over a `gymnasium.vector.VectorEnv`.

It knows nothing but Gymnasium's interface: what it learns on one vector env, it learns on any other that equals it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from adapters.neighbours import require, seeded

torch = require("torch")

NUM_STEPS = 64
GAMMA, LAMBDA = 0.98, 0.9
CLIP = 0.2
EPOCHS, BATCH_SIZE = 8, 128
LEARNING_RATE = 2e-3


class Batch(NamedTuple):
    """Steps of all envs, each array `(num_steps, num_envs, ...)`."""

    observations: Any
    actions: Any
    log_probs: Any
    values: Any
    rewards: Any
    terminations: Any
    ended: Any
    is_reset: Any
    """Whether it was no step: in `"NextStep"` mode the one after an end resets, and its action is ignored."""


@dataclass
class Learned:
    """The result: returns of episodes in the order they ended, the loss of each update, and the weights."""

    returns: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)


def learn(vector_env: Any, num_updates: int, seed: int = 1) -> Learned:
    """Learn on a vector env in `"NextStep"` mode, whose actions are `Discrete`."""
    envs: Any = RecordEpisodeStatistics(vector_env)
    learned = Learned()
    with seeded(seed):
        actor, critic = _network(envs, envs.single_action_space.n, 0.01), _network(envs, 1, 1.0)
        weights = [*actor.parameters(), *critic.parameters()]
        optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE, eps=1e-5)
        observations, ended = envs.reset(seed=seed)[0], np.zeros(envs.num_envs, bool)
        for update in range(num_updates):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update / num_updates)
            batch, observations, ended = _collect(envs, actor, critic, observations, ended, learned)
            learned.losses.append(_improve(actor, critic, optimizer, batch, _value(critic, observations)))
    learned.weights = [weight.detach().numpy() for weight in weights]
    return learned


def _network(envs: Any, num_outputs: int, scale: float) -> Any:
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    layers = [linear(envs.single_observation_space.shape[0], 64), linear(64, 64), linear(64, int(num_outputs))]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, scale), strict=True):
        torch.nn.init.orthogonal_(layer.weight, gain)
        torch.nn.init.zeros_(layer.bias)
    return torch.nn.Sequential(layers[0], tanh(), layers[1], tanh(), layers[2])


def _collect(
    envs: Any, actor: Any, critic: Any, observations: Any, ended: Any, learned: Learned
) -> tuple[Batch, Any, Any]:
    """Return steps, and the states of the envs after them."""
    steps: list[Any] = []
    for _ in range(NUM_STEPS):
        seen, is_reset = observations, ended
        policy = torch.distributions.Categorical(logits=actor(torch.as_tensor(seen)).detach())
        action = policy.sample()
        observations, rewards, terminations, truncations, infos = envs.step(action.numpy())
        ended = terminations | truncations
        if ended.any():
            learned.returns += infos["episode"]["r"][infos["_episode"]].tolist()
        steps.append(
            (seen, action, policy.log_prob(action), _value(critic, seen), rewards, terminations, ended, is_reset)
        )
    stacked = [torch.stack([torch.as_tensor(part) for part in column]) for column in zip(*steps, strict=True)]
    return Batch(*stacked), observations, ended


def _value(critic: Any, observations: Any) -> Any:
    return critic(torch.as_tensor(observations)).detach().squeeze(-1)


def _advantages(batch: Batch, last_value: Any) -> Any:
    """Return generalised advantages. What follows a step is the end of its episode, never the start of the next."""
    following, advantage = last_value, torch.zeros_like(last_value)
    advantages = torch.zeros_like(batch.values)
    for step in reversed(range(len(batch.values))):
        goes_on = ~batch.terminations[step]
        delta = batch.rewards[step].float() + GAMMA * following * goes_on - batch.values[step]
        advantage = delta + GAMMA * LAMBDA * advantage * ~batch.ended[step]
        advantages[step], following = advantage, batch.values[step]
    return advantages


def _improve(actor: Any, critic: Any, optimizer: Any, batch: Batch, last_value: Any) -> float:
    """Update the weights with all valid steps; return the last loss."""
    advantages = _advantages(batch, last_value)
    counts = ~batch.is_reset
    observations, actions, log_probs = batch.observations[counts], batch.actions[counts], batch.log_probs[counts]
    targets, advantages = (advantages + batch.values)[counts], advantages[counts]
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(actions)).split(BATCH_SIZE):
            policy = torch.distributions.Categorical(logits=actor(observations[rows]))
            ratio = (policy.log_prob(actions[rows]) - log_probs[rows]).exp()
            gain = (advantages[rows] - advantages[rows].mean()) / (advantages[rows].std() + 1e-8)
            clipped = torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP))
            errors = critic(observations[rows]).squeeze(-1) - targets[rows]
            loss = 0.5 * errors.square().mean() - clipped.mean() - 0.005 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()
    return float(loss.detach())
