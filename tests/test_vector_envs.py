"""Vector envs as items of the user's list: their sub-envs are as if they had been given one by one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset, TimeLimit, TransformObservation
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from modes import ORACLE, PROCESSES, THREADS, here_and_in_processes, in_modes
from vector_envs import DISABLED, EXIT, GO, INTERRUPT, NEXT, RAISE, RUN, SAME, WAIT, Walk, Walks, synced

from parallelenv import ParallelEnv
from parallelenv.contract.protocol import Lookup
from parallelenv.errors import (
    ArgumentError,
    EnvBusyError,
    EnvContractError,
    EnvInterruptedError,
    InvalidEnvError,
    UnpicklableError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from parallelenv.testing import envs as zoo
from parallelenv.testing.contract import DONE_POLICIES, LENGTHS, Actions, assert_same, drain, items

ALL = [(make, autoreset) for make in (synced, Walks) for autoreset in (NEXT, SAME, DISABLED)]
FIT: dict[Any, list[tuple[Any, str]]] = {
    None: [(synced, NEXT), (synced, DISABLED), (Walks, NEXT), (Walks, DISABLED)],
    "idle": [(Walks, DISABLED)],
    "restart": [(synced, NEXT), (synced, SAME), (synced, DISABLED), (Walks, SAME), (Walks, DISABLED)],
    "continue": [(synced, NEXT), (synced, DISABLED), (Walks, NEXT), (Walks, DISABLED)],
}
"""Vector envs that fit a done policy."""


def envs_of(policy: Any, *, apart: bool) -> tuple[list[Any], list[range], list[bool]]:
    """Return env fns of all vector envs that fit a done policy, with an env in between; the env ids of each,
    and whether it resets a part of them. ``apart``: the same envs one by one."""
    env_fns: list[Any] = []
    whole, resets_some = [range(0)], []
    for number, (make, autoreset) in enumerate(FIT[policy]):
        lengths = [3 + number, 5, 4] if number % 2 else [6, 3 + number]
        resets_itself = policy == "continue" and autoreset == NEXT
        singles = [partial(Autoreset, Walk(length)) if resets_itself else partial(Walk, length) for length in lengths]
        env_fns += [*singles, partial(Walk, 5)] if apart else [partial(make, lengths, autoreset), partial(Walk, 5)]
        for size in (len(lengths), 1):
            whole.append(range(whole[-1].stop, whole[-1].stop + size))
        resets_some += [make is synced or autoreset == DISABLED, True]
    return env_fns, whole[1:], resets_some


class Pair:
    """A `ParallelEnv` of vector envs, and one of the same envs one by one; each call is made of both and compared."""

    def __init__(self, one: ParallelEnv, other: ParallelEnv) -> None:
        self.one, self.other = one, other

    def __call__(self, call: str, *arguments: Any, **keywords: Any) -> Any:
        found, expected = (items(getattr(env, call)(*arguments, **keywords)) for env in (self.one, self.other))
        label = f"{call} {arguments} {keywords} "
        assert_same(expected, found, label)
        assert_same(self.other.done, self.one.done, label + "done")
        assert_same(self.other.reset_infos, self.one.reset_infos, label + "reset_infos")
        return found


@pytest.mark.parametrize("policy", DONE_POLICIES)
def test_results_equal_those_of_the_envs_one_by_one(policy: Any, make_env: MakeEnv) -> None:
    env_fns, whole, resets_some = envs_of(policy, apart=False)
    kinds = [kind for vec in FIT[policy] for kind in (vec, None)]  # of each of `whole`
    one = make_env(env_fns, asynchronous=policy, num_cpus=2)
    chance = np.random.default_rng(3)
    with ParallelEnv(envs_of(policy, apart=True)[0], ORACLE, policy) as other:
        other.engine.plans_steps = False
        both = Pair(one, other)
        both("reset", seed=7)
        for turn in range(60):
            actions = chance.integers(0, 2, len(one))
            if turn % 3 == 2 and turn > 20:  # some items, in any order
                chosen = chance.permutation(len(whole))[: 1 + turn % len(whole)]
                ids = [env_id for place in chosen for env_id in chance.permutation(whole[place]).tolist()]
                if turn % 2:
                    both("step", actions[ids], ids, align="batch")
                else:
                    both("send", actions[ids], ids)
                    assert_same(drain(other), drain(one), "received ")
            else:
                both("step", actions, align="item" if turn < 12 or turn % 2 else "batch")
            if policy == "continue":  # `SyncVectorEnv` without autoreset refuses to step an env that has ended
                fixed = [group for group, kind in zip(whole, kinds, strict=True) if kind == (synced, DISABLED)]
                both("reset", [env_id for group in fixed for env_id in group if one.done[env_id]][::-1])
            if policy is None and one.all_done():
                both("reset", options={"begin": turn % 2})
            elif policy is not None and turn % 5 == 4:  # parts of those that can
                parts, seeds = [], []
                for group, kind, can in zip(whole, kinds, resets_some, strict=True):
                    part = [env_id for env_id in group if can and chance.random() < 0.3]
                    takes_seeds = turn % 2 and (kind is None or kind[0] is synced)
                    seeds += [int(chance.integers(99)) if takes_seeds else None for _ in part]
                    parts += part
                both("reset", parts, seed=seeds, options={"begin": turn % 2})
            if turn == 30:
                both("reset", seed=turn)
        assert_same(other.engine.table.stats.summary(), one.engine.table.stats.summary(), "stats ")


@pytest.mark.parametrize("policy", DONE_POLICIES)
@pytest.mark.parametrize(("make", "autoreset"), ALL, ids=lambda one: getattr(one, "__name__", one))
def test_vector_envs_that_do_not_fit_the_done_policy_are_refused(make: Any, autoreset: str, policy: Any) -> None:
    if (make, autoreset) not in FIT[policy]:
        why = "starts the next episode within" if autoreset == SAME else "cannot (step without|start an episode)"
        with pytest.raises(InvalidEnvError, match=rf"envs \[1, 2\] are one vector env.*{autoreset}.*{why}"):
            ParallelEnv([Walk, partial(make, (4, 5), autoreset)], ORACLE, policy)


APART = [partial(Walk, length) for length in (3, 6, 4, 5, 4, 7)]
"""The envs of `some`."""


def some(vec: Any = synced, autoreset: str = DISABLED) -> list[Any]:
    """Return a vector env of envs 0 to 2, env 3, and a vector env of envs 4 and 5."""
    return [partial(vec, (3, 6, 4), autoreset), partial(Walk, 5), partial(vec, (4, 7), autoreset)]


# ---------------------------------------------------------------- a part of a vector env


@pytest.mark.parametrize("policy", [None, "idle", "continue"])
def test_envs_step_without_others_of_their_vector_env_only_if_these_have_ended(policy: Any) -> None:
    with ParallelEnv(some(Walks), asynchronous=policy) as env:
        env.reset()
        for call in (
            partial(env.step, [0, 0], [2, 3]),
            partial(env.send, [0, 0], [2, 3]),
            partial(env.run_episodes, len, 2),
        ):
            with pytest.raises(ArgumentError, match=r"a part of .*Walks, of envs \[0, 1, 2\], which steps all"):
                call()
        for _ in range(3):
            states = env.step([0] * 6).states
        assert states[:, 1].tolist() == [3] * 6
        if policy is not None:  # env 0 has ended
            assert env.step([0, 0], [1, 2]).states[:, 1].tolist() == [4, 4]


def test_step_of_a_part_is_refused_each_time() -> None:
    with ParallelEnv([partial(synced, (3, 9))], asynchronous="continue") as env:
        env.reset()
        for _ in range(3):
            env.step([0, 0])
        for _ in range(3):
            with pytest.raises(ArgumentError, match="a part of one vector env, SyncVectorEnv"):
                env.step([0], [1])


def test_calls_for_a_part_are_refused_before_anything_is_sent() -> None:
    group = r"envs \[1\] are a part of one vector env, SyncVectorEnv, of envs \[0, 1, 2\]"
    with ParallelEnv(some(), asynchronous="restart") as env:
        env.reset()
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: env.send([0, 0], [1, 3]), "which steps all that have an episode"),
            (lambda: env.set_env_attr("length", 9, [3, 1]), "whose attributes can only be set for all of its envs"),
            (lambda: env.customized_method("tell", id=1), "whose methods can only be called for all of its envs"),
            (lambda: env.rollout(len, 3, id=[1, 3]), ""),
        ]
        for call, why in calls:
            with pytest.raises(ArgumentError, match=f"{group}, {why}"):
                call()
        state = env.save_state()
        without = dataclasses.replace(state, envs=(None, *state.envs[1:2], None, *state.envs[3:]))
        with pytest.raises(ArgumentError, match=f"{group}, which can only be loaded as a whole"):
            env.load_state(without)
        env.pause([0, 2])
        with pytest.raises(ArgumentError, match=group + ".*pause none of them"):
            env.step([0] * 4)
        env.resume()
        for play in (partial(env.rollout, len, num_episodes=6), partial(env.run_episodes, len, 6)):
            with pytest.raises(ArgumentError, match=r"SyncVectorEnv, which steps only as a whole, but in r.*each env"):
                play()
        assert env.get_env_attr("length", [1, 3]) == [6, 5]
        assert env.reset([1], options={"begin": 2})[:, 1].tolist() == [2]
        assert env.step([0] * 6).states[:, 1].tolist() == [1, 3, 1, 1, 1, 1]
    with ParallelEnv(some(Walks, NEXT)) as env, pytest.raises(ArgumentError, match="which can only be reset as a "):
        env.reset([0, 3])


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("action", [RAISE, EXIT])
@pytest.mark.parametrize("vec", [synced, Walks])
@in_modes(PROCESSES)
def test_exception_and_death_in_a_step_fail_the_vector_env_once(vec: Any, action: int, make_env: MakeEnv) -> None:
    env = make_env(some(vec), asynchronous="restart", num_cpus=3)
    env.reset(seed=1)
    with pytest.raises(ZeroDivisionError if action == RAISE else WorkerDiedError) as caught:
        env.step([GO, action, GO, GO, GO, GO])
    error: Any = caught.value
    assert (error.env_ids, error.partial.env_ids.tolist()) == ((0, 1, 2), [3, 4, 5])
    assert env.step([GO] * 3, [5, 3, 4]).states[:, 1].tolist() == [2, 2, 2]
    assert env.restart(2) == (0, 1, 2)
    with pytest.raises(ResetNeeded, match=r"envs \[0, 1, 2\] have no running episode"):
        env.step([GO] * 6)
    env.reset([0, 1, 2], seed=1)
    with pytest.raises(ZeroDivisionError, match="fell over") as caught:
        env.step([RAISE] * 6)
    assert caught.value.env_ids == (0, 1, 2, 3, 4, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("vec", [synced, Walks])
@here_and_in_processes
def test_vector_envs_that_fail_are_restarted(vec: Any, mode: str, make_env: MakeEnv) -> None:
    env = make_env(some(vec), asynchronous="restart", num_cpus=3, on_failure="restart")
    env.reset(seed=1)
    for _ in range(2):
        env.step([GO] * 6)
        result = env.step([GO, EXIT if mode == PROCESSES else RAISE, GO, GO, GO, GO])
        assert result.truncated.tolist()[:3] == [True, True, True]
        assert ["failure" in info for info in result.infos] == [True] * 3 + [False] * 3
        assert result.states[:3, 1].tolist() == [0, 0, 0]
    assert env.step([GO] * 6).states[:3, 1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("vec", [synced, Walks])
def test_vector_env_restarted_after_a_failure_starts_in_the_next_step(vec: Any) -> None:
    def play(envs: list[Any]) -> list[Any]:
        with ParallelEnv(envs, asynchronous="continue", on_failure="restart") as env:
            adapter: Any = env.to_gymnasium("NextStep")
            adapter.reset(seed=0)
            return [adapter.step(np.full(2, action))[:4] for action in (GO, RAISE, RUN, RUN)][2:]

    for ours, expected in zip(play([vec]), play([partial(Walk, 4), partial(Walk, 5)]), strict=True):
        assert_same(expected[0][:, :2], ours[0][:, :2])  # not the luck: after a failure seeds are derived
        assert_same(expected[1:], ours[1:])


# ---------------------------------------------------------------- spaces and arrays


def plain(value: Any) -> Any:
    """Return a value with Python's numbers in place of NumPy's, which infos of vector envs have."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [plain(child) for child in value.tolist()]
    return value


def synced_zoo(kind: Any, autoreset: str, numbers: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(kind, one, length=LENGTHS[one]) for one in numbers], autoreset_mode=autoreset)


class Final(zoo.Counter):
    """Its infos have the keys with which a vector env describes the ends of episodes."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"final_info": {"own": 1}, "final_obs": self.count}


@pytest.mark.parametrize("autoreset", [NEXT, DISABLED])
@here_and_in_processes
def test_keys_of_same_step_are_infos_like_others_in_other_autoreset_modes(autoreset: str, make_env: MakeEnv) -> None:
    env = make_env([partial(synced_zoo, Final, autoreset, (0, 2))], asynchronous="restart")
    env.reset()
    for count in range(1, 4):  # the episode of one of the envs ends in the third step
        result = env.step([1, 1])
        assert [(info["final_info"], info["final_obs"]) for info in result.infos] == [({"own": 1}, count)] * 2
    assert result.dones.tolist() == [False, True]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("policy", "autoreset"), [("restart", SAME), ("restart", NEXT), (None, DISABLED)])
@pytest.mark.parametrize("kind", [zoo.Sheet, zoo.Words, zoo.Chain, zoo.Net])  # `Sheet` also has Dict actions
@here_and_in_processes
def test_states_and_actions_of_any_space(
    kind: Any, policy: Any, autoreset: str, copies: bool, make_env: MakeEnv
) -> None:
    if (kind, autoreset) == (zoo.Sheet, SAME):
        kind = owned_sheet
    singles = [partial(kind, number, length=length) for number, length in enumerate(LENGTHS)]
    group = partial(synced_zoo, kind, autoreset)
    env = make_env([partial(group, (0, 1, 2)), singles[3], partial(group, [4])], asynchronous=policy, copy=copies)
    with ParallelEnv(singles, asynchronous=policy) as other:
        actions = Actions(other, 3)
        assert_same(plain(other.reset(seed=3)), plain(env.reset(seed=3)))
        for _ in range(14):
            drawn = actions.draw(range(5))
            assert_same(plain(items(other.step(drawn))), plain(items(env.step(drawn))))
            if policy is None and other.has_done():
                assert_same(plain(other.reset()), plain(env.reset()))


def owned_sheet(number: int, length: int) -> Any:
    """Return a `Sheet` that does not overwrite its last state, which `SyncVectorEnv` returns without a copy."""
    return TransformObservation(zoo.Sheet(number, length=length), copy.deepcopy, None)


def test_spaces_may_differ_between_items(make_env: MakeEnv) -> None:
    words = partial(SyncVectorEnv, [zoo.Words] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env = make_env([partial(Walks, (3, 4), SAME), zoo.Counter, words], asynchronous="restart", num_cpus=2)
    assert [type(state) for state in env.reset(seed=1)] == [np.ndarray] * 3 + [str] * 2
    assert [type(space).__name__ for space in env.observation_spaces] == ["Box"] * 3 + ["Text"] * 2
    for _ in range(4):
        result = env.step([GO, RUN, 2, "a", "b"])
    assert result.states[0][:2].tolist() == [3, 1]
    assert result.infos[3]["ended_state"].startswith("0 4")
    assert result.dones.tolist() == [False, True, True, True, True]


class Foreign:
    """An array of another library, which has only some attributes of a NumPy array."""

    def __init__(self, names: tuple[str, ...], array: Any) -> None:
        self._names, self._array = names, np.array(array)

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(name)
        return getattr(self._array, name)

    def __len__(self) -> int:
        return len(self._array)


class ForeignWalks(Walks):
    def __init__(self, lengths: Any, autoreset: str, names: tuple[str, ...]) -> None:
        super().__init__(lengths, autoreset)
        self.kind = partial(Foreign, names)

    def reset(self, **keywords: Any) -> Any:
        states, infos = super().reset(**keywords)
        return self.kind(states), infos | {"pair": self.kind(infos["pair"])}

    def step(self, actions: Any) -> Any:
        *parts, infos = super().step(actions)
        return *map(self.kind, parts), infos | {"pair": self.kind(infos["pair"])}


@pytest.mark.parametrize("names", [("__array__", "shape", "dtype", "ndim"), ("__dlpack__", "__dlpack_device__")])
@pytest.mark.parametrize(("policy", "autoreset"), [("restart", SAME), ("idle", DISABLED), ("continue", NEXT)])
def test_arrays_of_other_libraries(policy: Any, autoreset: str, names: Any) -> None:
    foreign = some(partial(ForeignWalks, names=names), autoreset)
    with (
        ParallelEnv(foreign, asynchronous=policy) as one,
        ParallelEnv(some(Walks, autoreset), asynchronous=policy) as other,
    ):
        both = Pair(one, other)
        both("reset", seed=3)
        for _ in range(8):
            both("step", [GO] * 6)


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("how", [NEXT, SAME, DISABLED])
@pytest.mark.parametrize("autoreset", [NEXT, SAME, DISABLED])
@pytest.mark.parametrize("vec", [synced, Walks])
def test_gymnasium_adapter(vec: Any, autoreset: str, how: str) -> None:
    policy: Any = "continue" if autoreset == NEXT else "restart"
    env = ParallelEnv(some(vec, autoreset), asynchronous=policy)
    with closing(env), closing(ParallelEnv(APART).to_gymnasium(autoreset_mode=AutoresetMode(how))) as other:
        cannot = {NEXT: autoreset != NEXT, SAME: (vec, autoreset) == (Walks, NEXT), DISABLED: autoreset == SAME}
        if cannot[how]:
            with pytest.raises(InvalidEnvError, match="does not fit this adapter"):
                env.to_gymnasium(autoreset_mode=AutoresetMode(how))
            return
        one = env.to_gymnasium(autoreset_mode=AutoresetMode(how))
        assert_same(other.reset(seed=3), one.reset(seed=3))
        for _ in range(25):
            expected = other.step(np.zeros(6, int))
            assert_same(expected, one.step(np.zeros(6, int)))
            ends = expected[2] | expected[3]
            if how == DISABLED and ends.any():
                if (vec, autoreset) == (Walks, NEXT):
                    with pytest.raises(ArgumentError, match="which can only be reset as a whole"):
                        one.reset(options={"reset_mask": ends})
                    return
                begun = [each.reset(options={"reset_mask": ends.copy()}) for each in (other, one)]
                assert_same(begun[0], begun[1])


# ---------------------------------------------------------------- results of vector envs


def changed(autoreset: str = NEXT, **attributes: Any) -> Any:
    """Return an env fn of `Walks` with these attributes and methods in place of its own."""

    def make() -> Walks:
        vec = Walks(autoreset=autoreset)
        vars(vec).update(attributes)
        return vec

    return make


def answering(place: int, value: Any, autoreset: str = NEXT) -> Any:
    """Return an env fn of `Walks` whose steps return this value in this place."""
    answer: list[Any] = [np.zeros((2, 3)), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}]
    answer[place] = value
    return changed(autoreset, step=lambda actions: tuple(answer))


def test_rewards_and_flags_of_other_dtypes_and_infos_of_every_kind() -> None:
    infos = {
        **{"objects": np.array([{"x": 1}, None]), "_objects": np.array([True, False])},
        **{"number": 5, "text": "to", "pair": (1, "b"), "three": [1, 2, 3], "none": None, "point": np.zeros(())},
        **{"dict": {"array": np.arange(4.0).reshape(2, 2), "all": "x", "_part": np.ones(2), "part": np.arange(2)}},
    }
    answer = np.zeros((2, 3)), [1, 2], np.zeros(2, int), np.array([0, 1], np.uint8), infos
    with ParallelEnv([changed(step=lambda actions: answer)], asynchronous="continue") as env:
        env.reset()
        result = env.step([GO, GO])
    assert (result.rewards.dtype, result.rewards.tolist(), result.dones.tolist()) == (float, [1, 2], [False, True])
    first = {"objects": {"x": 1}, "number": 5, "text": "to", "pair": 1, "three": [1, 2, 3], "none": None}
    first |= {"point": np.zeros(()), "dict": {"array": np.arange(2.0), "all": "x", "part": 0}}
    second = {**first, "pair": "b", "dict": {"array": np.arange(2.0, 4), "all": "x", "part": 1}}
    del second["objects"]
    assert_same([first, second], [plain(info) for info in result.infos])


class Numbering(Walk):
    """Its infos have keys that are not strings."""

    def _info(self) -> dict[Any, Any]:
        agents = {agent: float(agent) for agent in range(self.count % 3)}
        return {"agents": agents, 7: self.count, (0, "x"): {True: "y"}} if self.count else {}


@pytest.mark.parametrize("autoreset", [NEXT, SAME, DISABLED])
def test_keys_of_infos_need_not_be_strings(autoreset: str) -> None:
    envs, lengths = [partial(synced, autoreset=autoreset, kind=Numbering)], (4, 5)
    with (
        ParallelEnv(envs, asynchronous="restart") as env,
        ParallelEnv([partial(Numbering, length) for length in lengths], asynchronous="restart") as other,
    ):
        other.reset(seed=1)
        env.reset(seed=1)
        for _ in range(12):
            found, expected = (each.step([GO, GO]).infos for each in (env, other))
            assert_same(list(map(plain, expected)), list(map(plain, found)))


class Steady(Walk):
    """Its infos are of one form, so they have columns."""

    def _info(self) -> dict[str, Any]:
        return {"count": np.int64(self.count), "pair": np.full(2, self.luck)}


@pytest.mark.parametrize("autoreset", [NEXT, SAME, DISABLED])
@here_and_in_processes
def test_steady_infos_have_columns_and_steps_have_plans(autoreset: str, make_env: MakeEnv) -> None:
    vec = partial(synced, autoreset=autoreset, kind=Steady)
    env = make_env([partial(vec, (9, 6, 4)), partial(vec, (4, 7))], asynchronous="restart", num_cpus=2)
    with ParallelEnv([partial(Steady, length) for length in (9, 6, 4, 4, 7)], asynchronous="restart") as other:
        other.engine.plans_steps = other.engine.learns_infos = False
        both = Pair(env, other)
        both("reset", seed=1)
        for turn in range(40):
            ids = None if turn % 4 else [4, 3]
            both("step", [GO] * (2 if ids else 5), ids, align="item" if turn % 5 else "batch")
    assert env.engine.plans
    assert env.engine.pool.batch.info_columns is not None


# ---------------------------------------------------------------- bad input


class Dm:
    """Looks like EnvPool's other interface."""

    all_env_ids = async_reset = reset = step = print


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ParallelEnv([partial(Walks, ())]), EnvContractError, "Walks has no envs"),
        (lambda: ParallelEnv.make_vec(3, 2), InvalidEnvError, "id=3 is neither a registered id"),  # type: ignore[arg-type]
        (lambda: ParallelEnv.make_vec("CartPole-v1", 2, num_workers=3), ArgumentError, "more than num_envs=2"),
        (lambda: ParallelEnv.make_vec("CartPole-v1", 0), ArgumentError, "num_envs=0"),
        (lambda: ParallelEnv([synced((3, 4), SAME), Walk], ORACLE, "idle"), InvalidEnvError, "vector envs lists"),
        (
            lambda: ParallelEnv([changed(metadata={"autoreset_mode": "sometimes"})]),
            EnvContractError,
            "Walks has autoreset_mode='sometimes' .* one of",
        ),
        (lambda: ParallelEnv([Dm]), InvalidEnvError, r"env 0 is .*, an EnvPool env. Make it with envpool.make_gymn"),
    ],
)
def test_bad_vector_envs_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_refused_vector_env_is_closed() -> None:
    wrong = changed(metadata={"autoreset_mode": "sometimes"})
    refused, sizes = [], [2, 3]

    def make(make_one: Any) -> Any:
        refused.append(make_one())
        return refused[-1]

    with pytest.raises(EnvContractError):
        ParallelEnv([partial(make, wrong)])
    with ParallelEnv([partial(make, lambda: synced(range(3, 3 + sizes.pop(0))))]) as env:
        with pytest.raises(InvalidEnvError):
            env.restart()
        assert [one.closed for one in refused] == [True] * 3


def step(env: ParallelEnv) -> Any:
    return env.step([GO] * 3)


NARROW = changed(single_action_space=Box(-100, 100, (), np.int8))
POOR = changed(get_attr=lambda name: 3 if name == "lengths" else [1], call=lambda name, **options: 3)
WRONG: list[tuple[Any, Callable[[ParallelEnv], Any], str]] = [
    # calls that it cannot make
    (synced, lambda env: env.reset([0, 1], options=[{"begin": 1}, {}]), "takes the same options"),
    (synced, lambda env: env.reset(options={"reset_mask": 1}), r"Give the envs to reset as id: reset\(id=mask\)"),
    (
        synced,
        lambda env: env.customized_method("tell", [{"word": word} for word in "abc"]),
        "SyncVectorEnv calls a method of all its envs with the same arguments, but different",
    ),
    (synced, lambda env: env.customized_method("tell", {"name": 1}, [0, 1]), "cannot pass on an argument named"),
    (synced, lambda env: env.customized_method("tel", id=[0, 1]), "no attribute 'tel'"),
    (synced, lambda env: env.set_env_attr("luck.x", 1, [0, 1]), "'luck.x' cannot be set in Sync"),
    (synced, lambda env: env.attr("lengt", id=[0, 1]), "have no attribute 'lengt'"),
    (Walks, lambda env: env.get_env_attr("length"), r"Walks has no get_attr\(\)"),
    (Walks, lambda env: env.set_env_attr("length", 3), r"Walks has no set_attr\(\)"),
    (Walks, lambda env: env.customized_method("tell"), r"Walks has no call\(\)"),
    (NARROW, lambda env: env.step([300, 0, 0]), r"The action 300 does not fit Box\(-100, 100"),
    # wrong answers
    (
        changed(reset=lambda **options: np.zeros((2, 3))),
        ParallelEnv.reset,
        "reset.. of Walks returned .*, not states and infos",
    ),
    (POOR, lambda env: env.get_env_attr("lengths"), "lengths of Walks returned 3, not one item each"),
    (POOR, lambda env: env.get_env_attr("other"), r"other of Walks returned \[1\], not one item each"),
    (POOR, lambda env: env.customized_method("tell"), r"tell\(\) of Walks returned 3, not one item each"),
    (changed(step=lambda actions: (1, 2, 3, 4)), step, "Walks returned .*, which is not five items"),
    (answering(0, np.zeros((2, 2))), step, r"of shape \(2,\).*observation space is"),
    (answering(0, np.zeros((2, 3)) * 1j), step, "dtype complex128.*observation space is"),
    (answering(0, np.zeros((1, 3))), step, r"of shape \(1, 3\).*must be of shape \(2, 3\)"),
    (answering(1, np.zeros(1)), step, r"rewards of shape \(1,\) .* float64; for 2 envs"),
    (answering(2, [None, None]), step, "terminations .* must be an array of bool"),
    (answering(4, None), step, "returned the infos None; infos are a dict"),
]


@pytest.mark.parametrize(("vec", "call", "message"), WRONG, ids=itertools.count())
def test_wrong_calls_and_answers_are_named(vec: Any, call: Callable[[ParallelEnv], Any], message: str) -> None:
    with ParallelEnv([vec, Walk], asynchronous="continue") as env:
        if call is not ParallelEnv.reset:
            env.reset(seed=1)
        with pytest.raises((EnvContractError, AttributeError), match=message) as caught:
            call(env)
        assert caught.value.env_ids == (0, 1)  # type: ignore[attr-defined]
        if vec in (synced, Walks):
            env.reset(seed=1)
            assert env.step([GO] * 3).states[:, 1].tolist() == [1, 1, 1]


def test_seeds_that_a_vector_env_does_not_take_are_refused_before_anything_is_sent() -> None:
    with ParallelEnv([Walk, partial(Walks, autoreset=DISABLED)]) as env:
        env.reset(seed=1)
        for call in (
            lambda: env.seed([1, 2, 4]),
            lambda: env.reset(seed=[1, 5, 5]),
            lambda: env.reset([1, 2], seed=[None, 1]),
            lambda: env.send_reset([1], seed=3),
        ):
            with pytest.raises(ArgumentError, match=r"envs \[1, 2\] are one vector env, Walks, which takes one seed"):
                call()
        assert env.step([GO] * 3).states[:, 1].tolist() == [1, 1, 1]
        assert env.seed([5, 1, 2]) == [5, 1, 2]
        states = env.reset()
        assert_same(states, env.reset([2, 0, 1], seed=[2, 5, 1])[[1, 2, 0]])


def test_wrapped_vector_env_is_reached_through_its_wrappers() -> None:
    make = partial(SyncVectorEnv, [lambda: TimeLimit(Walk(3), 9), lambda: TimeLimit(Walk(5), 9)])
    with ParallelEnv([lambda: RecordEpisodeStatistics(make()), Walk], asynchronous="restart") as env:
        env.reset()
        for _ in range(3):
            result = env.step([GO] * 3)
        assert result.infos[0]["episode"]["l"] == 3
        assert env.customized_method("tell", id=[1, 0]) == ["5", "3"]
        env.set_env_attr("length", 9)
        assert env.get_env_attr("length") == [9, 9, 9]
        wrapped = {RecordEpisodeStatistics: True, TimeLimit: True, Autoreset: False, SyncVectorEnv: False, Walk: False}
        for kind, is_wrapped in wrapped.items():
            found = env.engine.pool.ask("get", range(3), [kind] * 3, Lookup(None, "wrapper")).listed()
            assert found == [is_wrapped, is_wrapped, False]


KINDS: dict[str, Callable[[], Any]] = {
    "two": Walks,
    "two others": partial(Walks, autoreset=SAME),
    "three": partial(Walks, (4, 4, 4)),
    "one": Walk,
}


@here_and_in_processes
def test_another_env_is_refused_by_restart(tmp_path: Path, mode: str, make_env: MakeEnv) -> None:
    files = tmp_path / "0", tmp_path / "1"
    files[0].write_text("one")
    files[1].write_text("two")
    env = make_env([lambda file=file: KINDS[file.read_text()]() for file in files], num_cpus=2)
    env.reset()
    for item, kind, message in (
        (1, "two others", "Walks was rebuilt as another vector env, or with another autoreset mode"),
        (1, "three", "Walks was rebuilt as a vector env of 3 envs instead of a vector env of 2 envs"),
        (1, "one", "Walk was rebuilt as a single env instead of a vector env of 2 envs"),
        (1, "two others", "Walks was rebuilt as another vector env"),  # although there is no env to compare it with
        (0, "two", "Walks was rebuilt as a vector env of 2 envs instead of a single env"),
    ):
        files[item].write_text(kind)
        if kind == "three" and mode == PROCESSES:
            os.kill(env.engine.pool.processes[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerDiedError):
                env.get_env_attr("lengths", 1)
        with pytest.raises(InvalidEnvError, match=f"^{message}.*An env fn must make the same env each") as caught:
            env.restart(item)
        assert caught.value.env_ids == ((0,), (1, 2))[item]  # type: ignore[attr-defined]
    with pytest.raises(InvalidEnvError, match="could not be rebuilt"):
        env.reset()
    files[0].write_text("one")
    files[1].write_text("two")
    assert env.restart([0, 1]) == (0, 1, 2)
    assert env.reset().shape == (3, 3)


class Easy(Walk, EzPickle):
    def __init__(self, length: int) -> None:
        EzPickle.__init__(self, length)
        super().__init__(length)


def test_only_single_envs_beside_vector_envs_that_reset_within_the_step_play_whole_episodes() -> None:
    with ParallelEnv([synced((3, 4), SAME), partial(Walk, 4)], asynchronous="restart") as env:
        with pytest.raises(InvalidEnvError, match=r"does not fit run_episodes\(\), play\(\) and record\(\) \(an ended"):
            env.record(lambda states: [0] * len(states), 3)
        env.reset()
        assert env.run_episodes(lambda states: [0] * len(states), 3, id=2).lengths.tolist() == [4, 4, 4]


def test_live_vector_envs_move_to_workers_by_pickle() -> None:
    with ParallelEnv([synced((3, 4), SAME), Walk], PROCESSES, "restart") as env:
        assert env.reset(seed=1).shape == (3, 3)
        assert env.restart(0) == (0, 1)
    with pytest.raises(UnpicklableError, match="env 0 cannot move to its worker: its instance Walks"):
        ParallelEnv([changed(lock=threading.Lock())()], PROCESSES)
    played = synced((3, 4), NEXT, Easy)
    played.reset()
    with pytest.warns(UserWarning, match="its class is an EzPickle"):
        ParallelEnv([played], PROCESSES).close()
    with ParallelEnv([partial(synced, (3, 4), NEXT, Easy)]) as env:
        assert env.save_state().unsaved == (0, 1)  # pickle would not keep the states
    with ParallelEnv([synced()]) as env, pytest.raises(InvalidEnvError, match="env 0 was given as a live instance"):
        env.restart(1)


# ---------------------------------------------------------------- workers, time and interrupts


@in_modes(THREADS, PROCESSES)
def test_late_vector_env_is_waited_for_or_restarted(make_env: MakeEnv) -> None:
    env = make_env(some(), asynchronous="restart", num_cpus=3, timeout=0.3)
    env.reset(seed=1)
    for way in ("wait", "restart"):
        with pytest.raises(WorkerTimeoutError, match=r"envs 4, 5 did not answer within 0\.3 s"):
            env.step([GO] * 4 + [WAIT, GO])
        if way == "wait":
            assert env.recv(6, timeout=20).env_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert env.restart(5) == (4, 5)
    assert env.recv(6).env_ids.tolist() == [0, 1, 2, 3]
    env.reset([4, 5])
    assert env.step([GO] * 6).states[4:, 1].tolist() == [1, 1]


@pytest.mark.parametrize("is_planned", [False, True])
def test_interrupt_in_the_step_of_a_vector_env(is_planned: bool) -> None:
    vec = partial(synced, autoreset=SAME)
    with ParallelEnv([Walk, partial(vec, (9, 8)), partial(vec, (9,))], asynchronous="restart") as env:
        env.reset(seed=1)
        for _ in range(3 * is_planned):
            env.step([GO] * 4)
        with pytest.raises(KeyboardInterrupt):
            env.step([GO, GO, INTERRUPT, GO])
        with pytest.raises(EnvBusyError):
            env.step([GO] * 4)
        with pytest.raises(
            EnvInterruptedError, match=r"envs 1, 2 were interrupted in the middle of step; .*reset\(\[1, 2\]\)"
        ) as caught:
            env.recv(4)
        assert caught.value.env_ids == (1, 2)  # type: ignore[attr-defined]
        assert caught.value.partial.env_ids.tolist() == [0, 3]  # type: ignore[attr-defined]
        env.reset([1, 2])
        assert env.step([GO] * 4).states[1:, 1].tolist() == [1, 1, 2 + 3 * is_planned]


# ---------------------------------------------------------------- other calls


def first_action(states: Any) -> Any:
    return np.asarray(states)[:, 1].astype(int) % 2


@pytest.mark.parametrize(("vec", "autoreset"), FIT["restart"], ids=lambda one: getattr(one, "__name__", one))
@here_and_in_processes
def test_rollouts_and_saved_states(vec: Any, autoreset: str, make_env: MakeEnv) -> None:
    env = make_env(some(vec, autoreset), asynchronous="restart", num_cpus=2)
    with ParallelEnv(APART, asynchronous="restart") as other:
        both = Pair(env, other)
        both("reset", seed=5)
        for _ in range(2):
            rollouts = [one.rollout(first_action, 11) for one in (env, other)]
            data = [{key: value for key, value in vars(one).items() if key != "seconds"} for one in rollouts]
            assert_same(data[1], data[0])
        both("step", [GO] * 6)
        both("reset", seed=6)
        both("step", [GO] * 6)
        saved = env.save_state()
        assert saved.unsaved == ()
        later = [items(env.step([GO] * 6)) for _ in range(9)]
        assert env.load_state(saved) == ()
        assert_same(later, [items(env.step([GO] * 6)) for _ in range(9)])


@pytest.mark.parametrize("vec", [synced, Walks])
def test_loaded_vector_env_resets_only_envs_whose_episode_has_ended(vec: Any) -> None:
    with ParallelEnv([vec]) as env:
        adapter: Any = env.to_gymnasium("NextStep")
        adapter.reset(seed=0)
        for _ in range(4):
            ended = np.any(adapter.step(np.full(2, GO))[2:4], axis=0)
        assert ended.tolist() == [True, False]
        saved = env.save_state()
        expected = [adapter.step(np.full(2, GO))[:4] for _ in range(3)]
        env.load_state(saved)
        assert_same(expected, [adapter.step(np.full(2, GO))[:4] for _ in range(3)])


@pytest.mark.parametrize("policy", ["idle", "restart", "continue"])
def test_episodes_of_vector_envs_whose_ended_envs_rest(policy: Any) -> None:
    with ParallelEnv(some(Walks), asynchronous=policy) as env, ParallelEnv(APART, asynchronous=policy) as other:
        expected, found = (vars(one.run_episodes(first_action, 15, seed=3)) for one in (other, env))
        assert_same(expected, found)
        both = Pair(env, other)
        both("reset", seed=1)
        if policy == "idle":
            rollouts = [one.rollout(first_action, num_episodes=6) for one in (env, other)]
            assert_same(rollouts[1].rewards, rollouts[0].rewards)
            assert_same(rollouts[1].valid, rollouts[0].valid)
        both("step", [GO] * 6)
    with ParallelEnv(some(Walks), asynchronous="restart") as env:
        env.reset()
        with pytest.raises(ArgumentError, match=r"in rollout\(num_episodes=...\) each env rests"):
            env.rollout(first_action, num_episodes=6)


@here_and_in_processes
def test_attributes_and_methods_of_envs(make_env: MakeEnv) -> None:
    env = make_env(some(), asynchronous="restart", num_cpus=2)
    env.reset(seed=1)
    assert env.get_env_attr("length") == [3, 6, 4, 5, 4, 7]
    assert env.get_env_attr("length", [5, 0, 3]) == [7, 3, 5]
    assert env.get_env_attr("lengt", default=0) == [0] * 6
    assert env.get_env_attr("np_random.bit_generator.nothing", default=0) == [0] * 6
    env.set_env_attr("length", values=[9, 8, 7], id=[2, 0, 1])
    assert env.get_env_attr("length") == [8, 7, 9, 5, 4, 7]
    env.set_env_attr("news", {"a": 1})
    assert env.get_env_attr("news") == [{"a": 1}] * 6
    assert env.customized_method("tell", {"word": "a"}, [5, 3, 4]) == ["a7", "a5", "a4"]
    assert env.customized_method("tell", [{"word": "a"}] * 3 + [{"word": "b"}] * 3)[2:] == ["a9", "b5", "b4", "b7"]
    assert len(set(env.customized_method("where"))) == env.num_workers
    assert [int(frame.max()) for frame in env.render([4, 0])] == [4, 8]
    assert env.render(tile=True).shape[2] == 3


class Mistaken(Walk):
    @property
    def total(self) -> float:
        return self.totl  # type: ignore[attr-defined, no-any-return]


@here_and_in_processes
def test_attribute_error_in_a_property_of_a_sub_env_is_an_error(make_env: MakeEnv) -> None:
    env = make_env([Walk, partial(synced, kind=Mistaken)])
    with pytest.raises(AttributeError, match="no attribute 'totl'"):
        env.get_env_attr("total", default=0)
    assert env.get_env_attr("total.half", 0, default=7) == [7]


@here_and_in_processes
def test_worker_info_has_the_first_env_of_a_vector_env(make_env: MakeEnv) -> None:
    env = make_env([partial(synced, (3, 4)), Walk, partial(synced, (3,))], num_cpus=3)
    env.reset(seed=7)
    env.step([GO] * 4)
    number = env.num_workers
    last = number - 1
    assert env.get_env_attr("told") == [
        *[(0, 4, 0, number, 7)] * 2,
        (2, 4, min(1, last), number, 9),
        (3, 4, last, number, 10),
    ]


class Global(Walk):
    def _info(self) -> dict[str, Any]:
        return {"drawn": np.random.random(), "other": random.random()}


@here_and_in_processes
def test_vector_envs_have_their_own_global_generators(make_env: MakeEnv) -> None:
    vec = partial(synced, autoreset=SAME, kind=Global)
    env_fns = [partial(vec, (3, 4)), Global, partial(vec, (3,))]
    env = make_env(env_fns, asynchronous="restart", seed=3, seed_globals=True)

    def steps() -> list[Any]:
        return [items(env.step([GO] * 4)) for _ in range(3)]

    env.reset()
    first, saved, second = steps(), env.save_state(), steps()
    env.load_state(saved)
    assert_same(second, steps())
    for _ in range(2):
        env.reset(seed=3)
        assert_same(first, steps())
        env.restart()


@here_and_in_processes
def test_profile(make_env: MakeEnv) -> None:
    env = make_env(some(), asynchronous="restart", num_cpus=2)
    env.reset()
    with env.profile() as profile:
        for _ in range(8):
            env.step([GO] * 6)
    assert [(one.env_id, one.steps) for one in profile.summary().envs] == [(0, 8), (3, 8), (4, 8)]


@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
@in_modes(PROCESSES)  # not in this process: after a death Gymnasium leaves shared memory behind
def test_async_vector_env_is_an_item_and_is_rebuilt_after_the_death_of_its_worker(make_env: MakeEnv) -> None:
    make = partial(AsyncVectorEnv, APART[:2], autoreset_mode=AutoresetMode.SAME_STEP)
    env = make_env([make, APART[2]], asynchronous="restart", num_cpus=2, timeout=20)
    with ParallelEnv(APART[:3], asynchronous="restart") as other:
        both = Pair(env, other)
        both("reset", seed=3)
        for _ in range(8):
            both("step", [GO] * 3)
    assert env.get_env_attr("length") == [3, 6, 4]
    assert env.get_env_attr("lengt") == [None] * 3
    assert env.save_state().unsaved == (0, 1)
    with pytest.raises(EOFError):
        env.step([GO, EXIT, GO])
    assert env.restart(0) == (0, 1)
    env.reset(seed=0)
    assert env.step([GO] * 3).rewards.tolist() == [0.5] * 3


@here_and_in_processes
def test_make_vec(make_env: MakeEnv) -> None:
    mode: Any = make_env([Walk]).para_mode
    how: Any = {"vectorization_mode": "sync", "max_episode_steps": 5, "num_workers": 2}
    with ParallelEnv.make_vec("CartPole-v1", 5, mode, "restart", **how) as env:
        assert len(env) == 5
        with ParallelEnv.make("CartPole-v1", 5) as other:
            assert_same(other.reset(seed=3), env.reset(seed=3))
        for _ in range(5):
            result = env.step([0, 1] * 2 + [0])
        assert result.truncated.all()
    with pytest.raises(InvalidEnvError, match=r"envs \[0, 1, 2\] are one vector env, CartPoleVectorEnv.*reset_mask"):
        ParallelEnv.make_vec("CartPole-v1", 3, mode, "restart", num_workers=1)


# ---------------------------------------------------------------- replaced workers and abandoned hosts


class Waiting(Walks):
    """Its step waits if asked, and then returns a value that no other step returns."""

    release, begun = threading.Event(), threading.Event()

    def step(self, actions: Any) -> Any:
        if WAIT not in actions:
            return super().step(actions)
        self.begun.set()
        self.release.wait(10)
        return np.full((2, 3), 100.0), np.full(self.num_envs, 7.0), *np.ones((2, self.num_envs), bool), {}


def test_late_step_of_a_vector_env_in_an_abandoned_thread_changes_nothing() -> None:
    with ParallelEnv([Waiting], THREADS, "continue", timeout=0.3) as env:
        env.reset(seed=0)
        with pytest.raises(WorkerTimeoutError):
            env.step([WAIT, WAIT])
        assert Waiting.begun.wait(10)
        late = next(one for one in threading.enumerate() if one.name.startswith("parallelenv-"))
        env.restart()
        first = env.reset(seed=0)
        Waiting.release.set()
        late.join(10)
        assert_same(first, env.engine.latest_states(copies=True))


def test_adapter_of_a_worker_of_single_envs_with_own_generators() -> None:
    envs = [partial(Walks, (4, 5), SAME), Walk, Walk, Walk]
    with ParallelEnv(envs, PROCESSES, "restart", num_cpus=2, seed_globals=True) as env:
        adapter: Any = env.to_gymnasium("SameStep")
        adapter.reset(seed=0)
        assert adapter.step(np.zeros(5, int))[1].tolist() == [0.5] * 5


def test_loose_leaves_of_a_rebuilt_vector_env_with_own_generators() -> None:
    with ParallelEnv([lambda: SyncVectorEnv([zoo.Words] * 2)], PROCESSES, "continue", seed_globals=True) as env:
        env.reset(seed=0)
        env.restart()
        first = env.reset(seed=0)
        assert_same(first, env.engine.latest_states())


def test_result_of_one_env_that_cannot_be_copied_fails_its_vector_env() -> None:
    locks = np.array([threading.Lock(), None], object)
    with ParallelEnv([answering(4, {"x": locks})], asynchronous="continue", on_failure="restart") as env:
        env.reset(seed=0)
        failures = [info["failure"] for info in env.step([GO, GO]).infos]
        assert [type(failure) for failure in failures] == [UnpicklableError] * 2


class Locked(Walk):
    """The infos of its last steps cannot be copied."""

    def _info(self) -> dict[str, Any]:
        return {"lock": threading.Lock()} if self.count == self.length else {}


def test_vector_env_needs_a_reset_if_a_last_result_cannot_be_copied() -> None:
    with ParallelEnv([partial(synced, (1, 5), DISABLED, Locked)], asynchronous="restart") as env:
        env.reset()
        with pytest.raises(UnpicklableError, match="The result contains a lock"):
            env.step([GO, GO])
        with pytest.raises(ResetNeeded):
            env.step([GO, GO])


def test_missing_last_states_are_named() -> None:
    with ParallelEnv([answering(2, np.ones(2, bool), SAME)], asynchronous="restart") as env:
        env.reset()
        with pytest.raises(EnvContractError, match="Walks has .*SameStep, but its infos lack 'final_obs'"):
            env.step([GO, GO])
