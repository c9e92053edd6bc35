"""Tests of `get_worker_info` in envs, and of shared arrays."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.contract.worker_info import get_worker_info
from parallelenv.env import ParallelEnv
from parallelenv.testing.base import Contract, Make
from parallelenv.testing.envs import Counter, SteppedEnv
from parallelenv.testing.scenario import NUM_ENVS, assert_same

ONES = [1] * NUM_ENVS
_NAMES = ("env_id", "num_envs", "worker_id", "num_workers", "seed")


class InfoEnv(Counter):
    """Calls `get_worker_info` in each method; ``told`` has the results by method."""

    def __init__(self, folder: str = "", seed: int | None = None, rank: int = -1, world_size: int = -1) -> None:
        self.told = {"made": _ask()}
        self.given = (rank, world_size, seed)
        self.folder = folder
        super().__init__(self.told["made"][0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.told["reset"] = _ask()
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> SteppedEnv:
        """Step, and try to write into shared arrays, if there are any."""
        self.told["step"] = _ask()
        result = super().step(action)
        return (*result[:4], {"shared": _look()})

    def ask(self) -> dict[str, Any]:
        """Return the results, including those of this call and of a thread of its own."""
        heard: list[Any] = []
        thread = threading.Thread(target=lambda: heard.append(get_worker_info()))
        thread.start()
        thread.join()
        return {**self.told, "asked": _ask(), "in a thread": heard[0], "given": self.given}

    def close(self) -> None:
        """Write the worker info on close into a file."""
        if self.folder:
            Path(self.folder, "_".join(map(str, _ask()))).touch()


def _ask() -> tuple[Any, ...]:
    info = get_worker_info()
    return tuple(getattr(info, name) for name in _NAMES)


def _look() -> dict[str, Any]:
    """Return what is shared, as far as visible without a copy, and whether it is writeable."""
    info = get_worker_info()
    seen: dict[str, Any] = {}
    for name, array in (info.shared if info is not None else {}).items():
        try:
            array[...] = 0
        except ValueError:
            seen[name] = (
                array.sum().item() if array.dtype.kind != "U" else str(array[0]),
                array.shape,
                array.dtype.str,
            )
        else:
            seen[name] = "was written"
    return seen


class WorkerInfoContract(Contract):
    """Tests of `get_worker_info` in envs."""

    def test_get_worker_info_works_in_every_env_method(self, make: Make, tmp_path: Path) -> None:
        """In its constructor, reset, step, other calls and close; envs of one worker get different infos."""
        env = make([functools.partial(InfoEnv, str(tmp_path))] * NUM_ENVS, "restart", seed=20)
        assert get_worker_info() is None
        env.reset()
        for _ in range(5):
            env.step(ONES)
        told = env.customized_method("ask")
        assert get_worker_info() is None
        workers = [one["made"][2] for one in told]
        assert sorted(set(workers)) == list(range(env.num_hosts))
        assert workers == sorted(workers)
        for env_id, one in enumerate(told):
            place = (env_id, NUM_ENVS, workers[env_id], env.num_hosts, 20 + env_id)
            assert [one[call] for call in ("made", "reset", "step", "asked")] == [place] * 4
            assert one["in a thread"] is None
        env.close()
        assert sorted(path.name.split("_")[0] for path in tmp_path.iterdir()) == list("01234")

    def test_worker_info_has_the_seed_of_the_latest_reset(self, make: Make) -> None:
        """If that reset had one; a rebuilt env has the seed of its constructor."""
        env = make([InfoEnv] * NUM_ENVS, num_cpus=3)
        env.send_reset(seed=7)
        env.recv(NUM_ENVS)
        env.reset([0, 4])
        env.reset(2, seed=70)
        assert [one["asked"][4] for one in env.customized_method("ask")] == [7, 8, 72, 10, 11]
        env.restart([1])
        assert env.customized_method("ask", id=1)[0]["made"][4] is None

    def test_policy_in_a_worker_gets_no_worker_info(self, make: Make) -> None:
        """``get_worker_info()`` returns None there."""
        env = make([InfoEnv] * NUM_ENVS, "restart")
        env.reset(seed=1)
        rollout = env.rollout(_policy_with_info, 5, progress=False)
        assert not rollout.extras["has_worker_info"].any()
        assert [one["step"][0] for one in env.customized_method("ask")] == list(range(NUM_ENVS))

    def test_replicated_envs_differ_in_seed_and_worker_info(self) -> None:
        """By the arguments that they ask for, and by their worker info."""
        copies = ParallelEnv.replicate(
            functools.partial(InfoEnv, rank=9), 3, self.para_mode, num_cpus=2, seed=5, **self.backend_options
        )
        with copies:
            told = copies.customized_method("ask")
            assert [one["given"] for one in told] == [(9, 3, 5), (9, 3, 6), (9, 3, 7)]
            assert [one["made"][0] for one in told] == [0, 1, 2]
            copies.reset()
            assert [one["reset"][4] for one in copies.customized_method("ask")] == [5, 6, 7]

    def test_shared_arrays_are_read_only_and_keep_their_values(self, make: Make) -> None:
        """With their original values, read-only, also in rebuilt envs."""
        arrays: dict[str, Any] = {
            "table": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::-1],
            "nothing": np.zeros((0, 2)),
            "number": np.array(2.5),
            "words": np.array(["some", "thing"]),
        }
        before = {name: array.copy() for name, array in arrays.items()}
        env = make([InfoEnv] * NUM_ENVS, shared=arrays)
        assert_same(before, arrays)
        arrays["table"][:] = 0
        expected = {
            "table": (66, (3, 4), "<i2"),
            "nothing": (0.0, (0, 2), "<f8"),
            "number": (2.5, (), "<f8"),
            "words": ("some", (2,), "<U5"),
        }
        env.reset()
        assert [info["shared"] for info in env.step(ONES).infos] == [expected] * NUM_ENVS
        env.restart()
        env.reset()
        assert [info["shared"] for info in env.step(ONES).infos] == [expected] * NUM_ENVS


def _policy_with_info(states: Any) -> Any:
    told = np.full(len(states), get_worker_info() is not None)
    return np.ones(len(states), np.int64), None, {"has_worker_info": told}
