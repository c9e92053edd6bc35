"""Deep Q-learning as people write it with Tianshou: its collector, buffer, algorithm and trainer."""

from __future__ import annotations

from typing import Any, NamedTuple

from adapters.neighbours import require, seeded


class Learned(NamedTuple):
    """The result: every transition, in the order in which they were stored; the weights; the policy."""

    transitions: dict[str, Any]
    weights: list[Any]
    policy: Any


def learn(venv: Any, num_steps: int, seed: int = 1) -> Learned:
    """Learn on a vector env like Tianshou's, with `Discrete` actions, for a total number of steps of all envs."""
    data, trainer = require("tianshou.data"), require("tianshou.trainer")
    venv.seed(seed)
    with seeded(seed):
        algorithm, policy = _algorithm(venv.observation_space[0], venv.action_space[0])
        buffer = data.VectorReplayBuffer(num_steps, venv.env_num)
        parameters = trainer.OffPolicyTrainerParams(
            training_collector=data.Collector(policy, venv, buffer, exploration_noise=True),
            max_epochs=1,
            epoch_num_steps=num_steps,
            collection_step_num_env_steps=5 * venv.env_num,
            update_step_num_gradient_steps_per_sample=0.25,
            batch_size=64,
            training_fn=lambda epoch, step: policy.set_eps_training(max(0.05, 1 - 3 * step / num_steps)),
            show_progress=False,
            verbose=False,
        )
        algorithm.run_training(parameters)
    names = ("obs", "act", "rew", "terminated", "truncated", "obs_next")
    weights = [weight.detach().numpy() for weight in policy.parameters()]
    return Learned({name: buffer[:][name] for name in names}, weights, policy)


def mean_return(policy: Any, venv: Any, num_episodes: int) -> float:
    """Return the mean return of the policy, without exploring."""
    collector = require("tianshou.data").Collector(policy, venv)
    return float(collector.collect(n_episode=num_episodes, reset_before_collect=True).returns.mean())


def _algorithm(observation_space: Any, action_space: Any) -> tuple[Any, Any]:
    dqn, optim = require("tianshou.algorithm.modelfree.dqn"), require("tianshou.algorithm.optim")
    net = require("tianshou.utils.net.common").Net
    model = net(state_shape=observation_space.shape, action_shape=action_space.n, hidden_sizes=[64, 64])
    policy = dqn.DiscreteQLearningPolicy(model=model, action_space=action_space, observation_space=observation_space)
    algorithm = dqn.DQN(
        policy=policy,
        optim=optim.AdamOptimizerFactory(lr=1e-3),
        gamma=0.98,
        n_step_return_horizon=3,
        target_update_freq=200,
    )
    return algorithm, policy
