"""PPO in the style of CleanRL, on `to_gymnasium()`: the training loop uses only Gymnasium's vector API.

The method is that of Schulman et al., Proximal Policy Optimization Algorithms (https://arxiv.org/abs/1707.06347).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from parallelenv import ParallelEnv

NUM_ENVS, NUM_STEPS, ITERATIONS, EPOCHS, MINIBATCHES = 8, 128, 30, 4, 4
GAMMA, GAE_LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 1e-3


class Agent(nn.Module):
    """A policy and a value function."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def advantages_of(rewards: Any, values: Any, dones: Any, last_value: Any) -> Any:
    """Return generalised advantage estimates, ``(num_steps, num_envs)``."""
    advantages, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for step in reversed(range(len(rewards))):
        next_value = last_value if step == len(rewards) - 1 else values[step + 1]
        delta = rewards[step] + GAMMA * next_value * ~dones[step] - values[step]
        running = delta + GAMMA * GAE_LAMBDA * running * ~dones[step]
        advantages[step] = running
    return advantages


def update(agent: Agent, optimizer: Any, batch: dict[str, Any]) -> None:
    """Improve the agent with the steps of one iteration."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch["actions"])).chunk(MINIBATCHES):
            chosen = Categorical(logits=agent.policy(batch["states"][rows]))
            ratio = (chosen.log_prob(batch["actions"][rows]) - batch["log_probs"][rows]).exp()
            advantages = batch["advantages"][rows]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            value_loss = ((agent.value(batch["states"][rows]).squeeze(-1) - batch["returns"][rows]) ** 2).mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - ENTROPY * chosen.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main(para_mode: str = "subproc", iterations: int = ITERATIONS) -> float:
    """Return the mean return of the latest 20 episodes."""
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    ended: list[float] = []
    with ParallelEnv(["CartPole-v1"] * NUM_ENVS, para_mode) as pool:
        envs = pool.to_gymnasium("SameStep")
        states, _ = envs.reset(seed=0)
        episode_returns = np.zeros(NUM_ENVS)
        for iteration in range(iterations):
            steps: list[tuple[Any, ...]] = []
            for _ in range(NUM_STEPS):
                given = torch.as_tensor(states)
                with torch.no_grad():
                    chosen = Categorical(logits=agent.policy(given))
                    actions, value = chosen.sample(), agent.value(given).squeeze(-1)
                states, rewards, terminations, truncations, _ = envs.step(actions.numpy())
                dones = terminations | truncations
                episode_returns += rewards
                ended += episode_returns[dones].tolist()
                episode_returns[dones] = 0
                reward, done = torch.as_tensor(rewards, dtype=torch.float32), torch.as_tensor(dones)
                steps.append((given, actions, chosen.log_prob(actions), value, reward, done))
            with torch.no_grad():
                last_value = agent.value(torch.as_tensor(states)).squeeze(-1)
            given, actions, log_probs, values, reward, done = map(torch.stack, zip(*steps, strict=True))
            advantages = advantages_of(reward, values, done, last_value)
            batch = {
                "states": given.flatten(0, 1),
                "actions": actions.flatten(),
                "log_probs": log_probs.flatten(),
                "advantages": advantages.flatten(),
                "returns": (advantages + values).flatten(),
            }
            update(agent, optimizer, batch)
            if iteration % 5 == 4:
                print(f"{(iteration + 1) * NUM_STEPS * NUM_ENVS:,} steps: mean return {np.mean(ended[-20:]):.0f}")
    return float(np.mean(ended[-20:]))


if __name__ == "__main__":
    main()
