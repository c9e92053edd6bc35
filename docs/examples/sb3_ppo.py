"""Trains an agent with Stable-Baselines3's PPO on `to_sb3()`, and evaluates the agent with `run_episodes`."""

from __future__ import annotations

from typing import Any

from stable_baselines3 import PPO

from parallelenv import ParallelEnv


def main(para_mode: str = "subproc", steps: int = 30_000) -> float:
    """Return the mean return of 20 episodes after the training."""
    with ParallelEnv(["CartPole-v1"] * 8, para_mode) as pool:
        agent = PPO("MlpPolicy", pool.to_sb3(), n_steps=128, learning_rate=1e-3, seed=0, device="cpu")
        agent.learn(steps)

    def policy(states: Any) -> Any:
        return agent.predict(states, deterministic=True)[0]

    with ParallelEnv(["CartPole-v1"] * 8, para_mode) as env:
        evaluation = env.run_episodes(policy, 20, seed=100)
    print(f"mean return {evaluation.returns.mean():.0f} in {len(evaluation)} episodes")
    return float(evaluation.returns.mean())


if __name__ == "__main__":
    main()
