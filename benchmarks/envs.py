"""The envs of the benchmarks. Most envs take a known time per step, so that a system's overhead can be measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

EPISODE = 500  # steps; an episode of CartPole-v1 has at most as many


class Timed(gymnasium.Env):
    """Takes a given time for each step, and always returns the same observation.

    Args:
        seconds: CPU time of a step.
        shape: Shape of the observation.
        dtype: Dtype of the observation.
        with_info: Whether each step has an info with two keys.
    """

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(
        self, seconds: float = 0.0, shape: tuple[int, ...] = (4,), dtype: str = "float32", with_info: bool = False
    ) -> None:
        high = 255 if dtype == "uint8" else np.inf
        low = 0 if dtype == "uint8" else -np.inf
        self.observation_space = gymnasium.spaces.Box(low, high, shape, np.dtype(dtype))
        self.seconds = seconds
        self.with_info = with_info
        self.count = 0
        self._observation: Any = np.ones(shape, dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.pass_time()
        self.count += 1
        info = {"count": self.count, "luck": 0.5} if self.with_info else {}
        return self._observation, 1.0, False, self.count >= EPISODE, info

    def pass_time(self) -> None:
        """Keep a core busy for ``seconds`` of CPU time. Wall time also passes while another process has the core."""
        if self.seconds:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass

    def total(self) -> int:
        """Return a number. Benchmarks call this method by its name."""
        return self.count


class Brief(Timed):
    """Ends the episode in every step, like a bandit."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.pass_time()
        return self._observation, 1.0, True, False, {}


class Texts(Timed):
    """Returns observations of an array and a text. The text's length varies, so shared memory has no place for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        array = self.observation_space
        self.observation_space = gymnasium.spaces.Dict({"array": array, "text": gymnasium.spaces.Text(40)})
        self._array = self._observation
        self._observation = {"array": self._array, "text": "begin"}

    def pass_time(self) -> None:
        super().pass_time()
        self._observation = {"array": self._array, "text": "x" * (1 + self.count % 40)}


class Sleeper(Timed):
    """Waits in each step, as for a remote service. The times are exponentially distributed, so some steps are slow.

    Args:
        seconds: Mean wall time of a step.
    """

    def pass_time(self) -> None:
        time.sleep(self.np_random.exponential(self.seconds))


def lean(states: Any) -> Any:
    """Push each cart to the side to which its pole leans: the policy of rollouts. Episodes have about 40 steps."""
    return (states[:, 2] > 0).astype(np.int64)


def make_highway(name: str = "highway-fast-v0") -> gymnasium.Env:
    """Make a real env with long steps: traffic on a motorway."""
    import highway_env  # noqa: F401 (registers its envs in the process that makes one)

    return gymnasium.make(name)


def make_pong() -> gymnasium.Env:
    """Make Pong in its usual form for training: grey pictures of 84x84, four frames per step."""
    import ale_py  # registers its envs

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from each env
    return gymnasium.wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1))


def make_minigrid() -> gymnasium.Env:
    """Make an env whose observations are a Dict of a direction, an image and a text."""
    import minigrid  # noqa: F401 (registers its envs)

    return gymnasium.make("MiniGrid-DoorKey-8x8-v0")


class Napper(Timed):
    """Waits equally long in each step without using a core, so that envs on one machine do not compete for cores."""

    def pass_time(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class EnvKind:
    """A kind of env, and how to make an env of this kind.

    Attributes:
        title: Description in the tables.
        make: Callable that makes an env. It is importable, so that it can be sent to every kind of worker.
        arguments: Keyword arguments of ``make``.
    """

    title: str
    make: Callable[..., gymnasium.Env]
    arguments: dict[str, Any] = field(default_factory=dict)

    def env_fns(self, num_envs: int) -> list[Callable[[], gymnasium.Env]]:
        """Return one env fn per env."""
        return [functools.partial(self.make, **self.arguments) for _ in range(num_envs)]

    def draw_actions(self, num_steps: int, num_envs: int) -> list[Any]:
        """Return a batch of random actions per step, from the env's own space. Every call returns the same actions."""
        env = self.make(**self.arguments)
        space = gymnasium.vector.utils.batch_space(env.action_space, num_envs)
        env.close()
        space.seed(0)
        return [space.sample() for _ in range(num_steps)]


def timed(seconds: float, title: str, **arguments: Any) -> EnvKind:
    """Return the kind of a `Timed` env."""
    return EnvKind(title, Timed, {"seconds": seconds, **arguments})


CARTPOLE = EnvKind("CartPole-v1", gymnasium.make, {"id": "CartPole-v1"})
BLACKJACK = EnvKind("Blackjack-v1", gymnasium.make, {"id": "Blackjack-v1"})
LUNAR_LANDER = EnvKind("LunarLander-v3", gymnasium.make, {"id": "LunarLander-v3"})
HALF_CHEETAH = EnvKind("HalfCheetah-v5", gymnasium.make, {"id": "HalfCheetah-v5"})
PONG = EnvKind("ALE/Pong-v5 with AtariPreprocessing", make_pong)
MINIGRID = EnvKind("MiniGrid-DoorKey-8x8-v0", make_minigrid)
HIGHWAY = EnvKind("highway-fast-v0", make_highway)
WHOLE_HIGHWAY = EnvKind("highway-v0", make_highway, {"name": "highway-v0"})
SLEEPER = EnvKind("sleep, exponential, mean 10 ms", Sleeper, {"seconds": 0.01})
STILL = EnvKind("a step of no cost", Timed)
BRIEF = EnvKind("episodes of one step", Brief)
KILOBYTE = timed(0.0, "a step of no cost, 1024 uint8", shape=(1024,), dtype="uint8")
TEXTS = EnvKind("100 us CPU, Dict of array and text", Texts, {"seconds": 100e-6})
NAPPER = EnvKind("sleep", Napper)
