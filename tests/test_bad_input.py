"""Every wrong argument gives a clear error before anything is sent, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv
from modes import ORACLE, PROCESSES, RAY, THREADS

import parallelenv
from parallelenv import TERMINATED, ParallelEnv, ParallelEnvError, ParallelWrapper, errors
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.errors import (
    AbsentAttributeError,
    ActionError,
    ArgumentError,
    ClosedError,
    EnvBusyError,
    IdRangeError,
    InvalidEnvError,
    MissingDependencyError,
    NothingInFlightError,
    UnpicklableError,
)
from parallelenv.testing.envs import Pair, Sheet, Toolbox

TOOLBOXES = [partial(Toolbox, number) for number in range(4)]


@pytest.fixture
def env(make_env: MakeEnv) -> ParallelEnv:
    """Four envs in two workers, after a reset."""
    env = make_env(TOOLBOXES, asynchronous="idle", num_cpus=2)
    env.reset()
    return env


# ---------------------------------------------------------------- construction


def pettingzoo_like() -> Any:
    """Return an object that looks like a PettingZoo env, so that PettingZoo need not be installed."""
    base = type("ParallelEnv", (), {"__module__": "pettingzoo.utils.env"})
    methods = {"reset": lambda self: ({}, {}), "step": lambda self, actions: ({}, {}, {}, {}, {})}
    return type("Game", (base,), methods)()


def closed_vector_env() -> Any:
    env = SyncVectorEnv([Toolbox] * 2)
    env.close()
    return env


TWIN, TWINS = Toolbox(), SyncVectorEnv([Toolbox] * 2)


@pytest.mark.parametrize(
    ("envs", "message"),
    [
        ([], "envs is empty"),
        (3, "envs=3 is not a list"),
        ([3], r"envs\[0\] is 3, which is not an env"),
        ([Toolbox, None], r"envs\[1\] is None, which is not an env"),
        ([np.zeros(2)], r"envs\[0\] is array.*, which is not an env"),
        ([gym.spaces.Discrete(2)], r"envs\[0\] is Discrete\(2\), which is not an env"),
        ([Path("env.py")], r"envs\[0\] is .*Path.*, which is not an env"),
        ([OrderedDict(a=1)], r"envs\[0\] is OrderedDict.*, which is not an env"),
        (["NoSuchEnv-v0"], r"envs\[0\] is 'NoSuchEnv-v0', which Gymnasium does not know"),
        (["no_such:Env-v0"], r"'no_such:Env-v0', whose module 'no_such' cannot be imported \(ModuleNotFound"),
        ([":Env-v0"], r"envs\[0\] is ':Env-v0', whose module '' cannot be imported \(ValueError: Empty module name\)"),
        ([TWIN, Toolbox(), TWIN], r"envs\[0\] and envs\[2\] are the same instance.*\[make\] \* n"),
        ([Toolbox, closed_vector_env()], "env 1 is SyncVectorEnv.*a vector env that is closed"),
        ([Toolbox, closed_vector_env], "env 1 is SyncVectorEnv.*a vector env that is closed"),
        (
            [TWIN, gym.wrappers.TimeLimit(TWIN, 5)],
            r"envs\[0\] and envs\[1\] are, or wrap, the same instance.*\[make\] \* n",
        ),
        ([TWINS, Toolbox, TWINS], r"envs\[0\] and envs\[2\] are the same instance.*\[make\] \* n"),
        ([lambda: TWINS, Toolbox, lambda: TWINS], "env fns of envs 0 and 2 returned the same instance"),
        ([Toolbox(), pettingzoo_like()], "env 1 is .*PettingZoo multi-agent env"),
        ([Toolbox, pettingzoo_like], "env 1 is .*PettingZoo multi-agent env"),
        ([Toolbox, lambda: None], "An env fn returned None"),
        *[(kind(TOOLBOXES), f"is a {kind.__name__}, which does not define env ids") for kind in (set, frozenset)],
        (dict.fromkeys(TOOLBOXES), "is a dict, which does not define env ids. Give a list"),
    ],
)
def test_invalid_lists_of_envs_are_refused(envs: Any, message: str) -> None:
    is_unordered = isinstance(envs, set | frozenset | dict)
    with pytest.raises(ArgumentError if is_unordered else InvalidEnvError, match=message):
        ParallelEnv(envs)


def test_module_that_lacks_another_module_is_named_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lacking.py").write_text("import absent_simulator\n")
    message = r"module 'lacking' cannot be imported \(ModuleNotFoundError: No module named 'absent_simulator'\)"
    with pytest.raises(InvalidEnvError, match=message) as caught:
        ParallelEnv(["lacking:Env-v0"])
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_env_fns_that_return_the_same_instance_are_refused_except_in_workers_which_have_copies() -> None:
    twin = Toolbox()
    for word in (ORACLE, THREADS):
        for make in (lambda: twin, lambda: gym.wrappers.TimeLimit(twin, 5)):  # a new wrapper each time
            with pytest.raises(
                InvalidEnvError, match=r"env fns of envs 0 and 1 .*same instance.*partial\(make, value\)"
            ):
                ParallelEnv([make] * 3, word, num_cpus=3)
    with ParallelEnv([lambda: twin] * 3, PROCESSES, num_cpus=2) as env:
        env.reset(seed=0)
        env.step([1], id=0)
        assert env.get_env_attr("count") == [1, 0, 0]


def test_unpicklable_env_is_named_in_the_error() -> None:
    def locked() -> Toolbox:
        env = Toolbox()
        env.lock = threading.Lock()  # type: ignore[attr-defined]
        return env

    with pytest.raises(UnpicklableError, match=r"env 1 cannot move to its worker.*These cannot be pickled: lock"):
        ParallelEnv([Toolbox(), locked()], PROCESSES)
    with ParallelEnv([Toolbox(), locked()], ORACLE) as env:
        assert len(env) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"para_mode": "subproz"}, rf"para_mode='subproz' is not known.*Did you mean {PROCESSES!r}\?"),
        ({"para_mode": 3}, "para_mode=3"),
        ({"asynchronous": "restrat"}, r"asynchronous='restrat'.*Did you mean 'restart'\?"),
        ({"num_cpus": -1}, "num_cpus=-1 must be an int of at least 1"),
        ({"num_cpus": 1.5}, r"num_cpus=1\.5"),
        ({"num_gpus": -1}, "num_gpus=-1 is not a number of GPUs"),
        ({"timeout": 0}, "timeout=0 must be a positive number"),
        ({"on_failure": "restrat"}, "on_failure='restrat'"),
        ({"max_restarts": 0}, "max_restarts=0"),
        ({"seed": [1, 2, 3]}, r"seed=\[1, 2, 3\] is not an int.*seed\(\[\.\.\.\]\)"),
        ({"seed": -1}, "seed=-1 is not a seed"),
        ({"shared": [np.zeros(2)]}, "shared is a list. Give a dict of numpy arrays"),
        ({"shared": {3: np.zeros(2)}}, "shared has the name 3, which is not a str"),
        ({"shared": {"a": [1, 2]}}, r"shared\['a'\] is a list"),
        ({"shared": {"a": np.ma.masked_array([1, 2], [True, False])}}, r"shared\['a'\] is a MaskedArray.*array\.mask"),
        ({"shared": {"a": np.array([{}])}}, r"shared\['a'\] is an array of object.*env fns"),
        *[
            ({name: value}, f"{name}={value!r} must be True or False")
            for name, value in itertools.product(["no_warning", "copy", "keep"], ["no", 0, None])
        ],
        ({"para_mode": PROCESSES, "strat_method": "fork"}, "strat_method='fork' is not an option of .*start_method"),
        ({"para_mode": PROCESSES, "start_method": "threads"}, "start_method='threads' is not available"),
        ({"start_method": "fork"}, "accepts no further options"),
        ({"nonsense": 5}, r"it accepts no further options\.$"),
        ({"num_cpu": 2}, r"^num_cpu=2 is not an option .* Did you mean 'num_cpus'\?$"),
        ({"para_mode": "auto", "num_cpu": 2}, r"^num_cpu=2 is not an option .* Did you mean 'num_cpus'\?$"),
    ],
)
def test_bad_constructor_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ParallelEnv(TOOLBOXES, **arguments)


@pytest.mark.parametrize("num_cpus", [0, None, np.int64(0)])
@pytest.mark.parametrize("timeout", [float("inf"), 1e30, np.float32(60), np.int64(60)])
def test_numbers_and_flags_may_be_those_of_numpy_and_no_num_cpus_means_all_cores(num_cpus: Any, timeout: Any) -> None:
    flags: dict[str, Any] = dict.fromkeys(["no_warning", "copy", "keep"], np.bool_(False))
    with ParallelEnv([Toolbox] * 64, THREADS, num_cpus=num_cpus, timeout=timeout, **flags) as env:
        assert env.num_workers == min(64, usable_cores())
        assert env.reset().shape == (64, 3)


MAKE: Any = partial(ParallelEnv.make, "CartPole-v1")
OWN: Any = Toolbox()
OWN.stream = (item for item in range(1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(MAKE, 0), ArgumentError, "num_envs=0"),
        (partial(ParallelEnv.make, "NoSuchEnv-v0", 2), InvalidEnvError, "NoSuchEnv"),
        (partial(MAKE, 2, num_cpu=2), ArgumentError, r"Did you mean 'num_cpus'\?$"),
        (partial(MAKE, 2, PROCESSES, caller_step=True), ArgumentError, r"Did you mean 'caller_steps'\?$"),
        (
            partial(MAKE, 2, PROCESSES, caller_steps=True),
            ArgumentError,
            r"caller_steps=True is not an argument .*give it in backend_options=\{'caller_steps': True\}",
        ),
        (partial(ParallelEnv.replicate, Toolbox, 0), ArgumentError, "num_envs=0 must be"),
        (partial(ParallelEnv.replicate, 3, 2), InvalidEnvError, r"envs\[0\] is 3, which is not an env"),
        (partial(ParallelEnv.replicate, [Toolbox], 2), InvalidEnvError, r"envs\[0\] is \["),
        (partial(ParallelEnv.replicate, OWN, 2), UnpicklableError, "env 0 cannot move"),
    ],
    ids=itertools.count(),
)
def test_bad_arguments_of_make_and_replicate_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_step_result_behaves_like_a_tuple_of_four() -> None:
    with ParallelEnv(TOOLBOXES) as env:
        env.reset()
        result = env.step([0] * 4)
    with pytest.raises(ValueError, match="expected 5, got 4"):
        _a, _b, _c, _d, _e = result  # type: ignore[misc]
    with pytest.raises(ValueError, match="expected 2"):
        _a, _b = result  # type: ignore[misc]
    items = [result[place] for place in range(4)]
    first, *rest = result
    one, two, three, four, five = (*result, "more")
    assert [first, *rest] == [*result] == list(result) == [one, two, three, four] == items  # the very same objects
    few, states = map(len, itertools.islice(result, 2))  # the unpacked items
    assert (few, states, five) == (4, 4, "more")
    left, right = map(list, (result, result))
    assert left == right == items
    *joined, last = itertools.chain(result, result)
    assert [*joined, last] == items * 2
    assert copy.deepcopy(result).env_ids.tolist() == [0, 1, 2, 3]


def test_seed_passed_as_reset_id_raises_with_a_hint(env: ParallelEnv) -> None:
    with pytest.raises(IdRangeError, match=r"id=42 names env 42, .* To set a seed, write reset\(seed=42\)\."):
        env.reset(42)
    for call in (lambda: env.reset([42]), lambda: env.reset(-1), lambda: env.step([0], 42)):
        with pytest.raises(IdRangeError) as caught:
            call()
        assert "seed" not in str(caught.value)
    assert_untouched(env)


def test_misspelt_attribute_error_suggests_the_correct_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ParalelEnv'\. Did you mean 'ParallelEnv'\?"):
        parallelenv.ParalelEnv  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'\.$"):
        parallelenv.nonsense  # type: ignore[attr-defined]  # noqa: B018
    with ParallelEnv(TOOLBOXES) as env:
        with pytest.raises(AbsentAttributeError, match=r"no attribute 'stepp'\. Did you mean 'step'\? If the envs"):
            env.stepp  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AbsentAttributeError, match=r"'actoin_space' to set\. Did you mean 'action_space'\?"):
            env.actoin_space = 1  # type: ignore[attr-defined]
        for name in ("action_space", "action_spaces", "observation_space", "observation_spaces", "done"):
            with pytest.raises(AbsentAttributeError, match=rf"'{name}' to set\. Give spaces=|\.{name} is read-only\.$"):
                setattr(env, name, 1)


# ---------------------------------------------------------------- calls


def assert_untouched(env: ParallelEnv) -> None:
    """Check that the envs have not been stepped, and can be."""
    assert env.get_env_attr("count") == [0, 0, 0, 0]
    states, *_ = env.step([0, 0, 0, 0])
    assert states[:, 1].tolist() == [1, 1, 1, 1]


IDS = [
    (4, IdRangeError, "id=4 names env 4, but ids run from 0 to 3"),
    ([0, -1], IdRangeError, "names env -1"),
    ([0, 1, 0], ArgumentError, "names env 0 twice"),
    (1.0, ArgumentError, r"id=1\.0 names no envs"),
    ([0, 1.0], ArgumentError, r"contains 1\.0, which"),
    (np.array([0.0]), ArgumentError, "not an int"),
    ([True, False], ArgumentError, "mask of length 2, but there are 4 envs"),
    (True, ArgumentError, "id=True names no envs"),
    ({0}, ArgumentError, "names no envs"),
    (slice("a", None), ArgumentError, "is not a valid slice"),
]
ACTIONS = [
    ([0, 0, 0], "3 actions were given for 4 envs"),
    ([0], "1 action was given for 4 envs"),
    (np.zeros(3, int), "3 actions were given"),
    (0, "is a single action"),
    (np.zeros((4, 1), int), r"shape \(4, 1\); expected \(4,\)"),
    ([0.5, 0, 0, 0], "dtype float64"),
    ([None, 0, 0, 0], "dtype object"),
    ([[0], [0, 1], 0, 0], "do not form an array"),
    (np.ma.masked_array([0] * 4, [True] * 4), "action is a MaskedArray, whose mask would be left out"),
    ([0, 0, np.ma.masked, 0], "action is a MaskedArray"),
    ({0: 1, 1: 1, 2: 1, 3: 1}, "action is a dict, which is not a batch"),
    ({0, 1, 2, 3}, "action is a set"),
]
SEEDS = [
    (1.5, r"seed=1\.5 is not a seed"),
    (-1, "Seeds are ints of 0 or more"),
    ([1, 2], "2 seeds were given for 4 envs"),
    ([1], "1 seed was given for 4 envs"),
    ([1, 2, 3, 0.5], r"seed=0\.5"),
    (np.array(5.0), "is not a seed"),
]
NAMES = ["", "a b", "steps.", "__class__", "unwrapped.__dict__", "f()", 3]


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        *(("id", *case) for case in IDS),
        *(("action", value, ActionError, message) for value, message in ACTIONS),
        *(("seed", value, ArgumentError, message) for value, message in SEEDS),
        *(("name", name, ArgumentError, "is not a valid name|double-underscore") for name in NAMES),
    ],
    ids=itertools.count(),
)
def test_invalid_ids_actions_seeds_and_names_are_refused(
    env: ParallelEnv, argument: str, value: Any, error: type[Exception], message: str
) -> None:
    calls: dict[str, list[Callable[..., Any]]] = {
        "id": [
            env.reset,
            lambda id: env.step([0], id),
            lambda id: env.send([0], id),
            partial(env.get_env_attr, "count"),
            partial(env.customized_method, "name", None),
        ],
        "action": [env.step, env.send],
        "seed": [env.seed, lambda seed: env.reset(seed=seed), lambda seed: env.send_reset(seed=seed)],
        "name": [env.get_env_attr, env.customized_method, partial(env.set_env_attr, value=1)],
    }
    for call in calls[argument]:
        with pytest.raises(error, match=message):
            call(value)
    assert_untouched(env)


def test_masked_part_of_an_action_is_refused(make_env: MakeEnv) -> None:
    env = make_env([partial(Sheet, number) for number in range(2)], num_cpus=2)
    env.reset()
    action = env.action_space.sample()  # type: ignore[union-attr]
    rows = [{key: part[row] for key, part in action.items()} for row in range(2)]
    rows[1]["force"] = np.ma.masked_array(rows[1]["force"], [True, False])
    masked = {**action, "force": np.ma.masked_array(action["force"], True)}
    for call in (partial(env.step, masked), partial(env.step, rows), partial(env.step, rows[1:], id=[1])):
        with pytest.raises(ActionError, match=r"action\['force'\] is a MaskedArray"):
            call()
    assert env.get_env_attr("count") == [0, 0]
    env.step(action)


def test_a_step_before_the_reset_is_refused(make_env: MakeEnv) -> None:
    env = make_env(TOOLBOXES)
    with pytest.raises(ResetNeeded, match=r"envs \[0, 1, 2, 3\] have no running episode"):
        env.step([0, 0, 0, 0])
    env.reset([0, 2])
    with pytest.raises(ResetNeeded, match=r"env 1 has no running episode"):
        env.send([0, 0], [0, 1])
    assert env.step([0, 0], [0, 2])[0][:, 1].tolist() == [1, 1]


class Recurrent:
    """Takes its arguments as a torch module does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, states: Any, rnn_state: Any) -> Any:
        return states, rnn_state, {}


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("step", {"action": [0] * 4, "align": "items"}, "align='items' is not known"),
        ("customized_method", {"data": [{"name": "a"}]}, "data has 1 item for 4 envs"),
        ("customized_method", {"data": [0, 1, 2, 3]}, "data contains 0.*envs are chosen with id="),
        ("customized_method", {"data": "name"}, "data='name' cannot be spread"),
        ("customized_method", {"data": {1: 2}}, "data={1: 2} cannot be spread"),
        ("customized_method", {"data": [{1: 2}] * 4}, "data contains {1: 2}. Give a dict of keyword arguments"),
        ("set_env_attr", {}, "either value .* or values"),
        ("set_env_attr", {"value": 1, "values": [1, 2, 3, 4]}, "either value .* or values"),
        ("set_env_attr", {"values": [1, 2]}, "values has 2 items for 4 envs"),
        ("reset", {"options": [{}]}, "options has 1 item for 4 envs"),
        ("reset", {"options": [1, 2, 3, 4]}, "contains 1. Give a dict for all envs, or a list with one"),
        ("send_reset", {"options": [None]}, "options has 1 item for 4 envs"),
        ("recv", {"min_envs": 2, "max_envs": 1}, "max_envs=1 is less than min_envs=2"),
        ("recv", {"min_envs": 0}, "min_envs=0"),
        ("arecv", {"min_envs": 0}, "min_envs=0"),
        ("arecv", {"align": "x"}, "align='x'"),
        ("arecv", {"timeout": -1}, "timeout=-1"),
        ("pause", {}, r"^pause\(\) was called without id\. .*pause\(3\)"),
        ("stream", {"policy": 3}, "policy is a int, which cannot be called"),
        ("stream", {"policy": len, "num_steps": 0}, "num_steps=0 must be an int of at least 1"),
        ("stream", {"policy": len, "min_envs": 0}, "min_envs=0 must be"),
        ("stream", {"policy": len, "min_envs": 3, "max_envs": 2}, "max_envs=2 is less than min_envs=3"),
        ("stream", {"policy": len, "timeout": 0}, "timeout=0 must be"),
        ("stream", {"policy": lambda states, rnn_state, done: states}, "cannot give it an rnn_state.*env_ids"),
        ("stream", {"policy": Recurrent()}, "cannot give it an rnn_state"),
        ("run_episodes", {"policy": 3, "num_episodes": 2}, "policy is a int, which cannot be called"),
        ("run_episodes", {"policy": len, "num_episodes": 0}, "num_episodes=0 must be an int of at least 1"),
        ("run_episodes", {"policy": len, "num_episodes": None}, "^num_episodes=None must be an int of at least 1"),
        ("run_episodes", {"policy": len, "num_episodes": 2, "id": []}, "has no envs to run"),
        ("run_episodes", {"policy": len, "num_episodes": 2, "seed": [1]}, "1 seed was given for 4 envs"),
        ("run_episodes", {"policy": len, "num_episodes": 2, "options": 5}, "options=5 cannot be spread"),
        ("send_action", {"action": TERMINATED, "env_id": 1}, "action=TERMINATED is not an action.*RESET or CLOSE"),
        ("send_action", {"action": 1, "env_id": [0, 1]}, r"env_id=\[0, 1\] is not the id of one env"),
        ("send_action", {"action": 1, "env_id": None}, "env_id=None is not the id of one env"),
    ],
)
def test_bad_arguments_of_calls_are_refused(
    env: ParallelEnv, call: str, arguments: dict[str, Any], message: str
) -> None:
    names = {"customized_method": ["name"], "set_env_attr": ["count"]}.get(call, [])
    method = partial(getattr(env, call), *names, **arguments)
    with pytest.raises(ArgumentError, match=message):
        asyncio.run(method()) if call == "arecv" else method()
    with pytest.raises(NothingInFlightError, match="no step is in flight"):
        env.recv()
    assert env.num_unpaused == 4
    assert_untouched(env)


IN_FLIGHT = (
    r"envs \[2\] have a step or a reset in flight whose result was not received \(sent, interrupted or late\)\. "
    r".*recv\(min_envs=1\).* or drop it with reset\(\)"
)


def test_step_of_a_busy_or_paused_env_is_refused(env: ParallelEnv) -> None:
    env.pause(None)
    assert env.num_unpaused == 0
    env.resume()
    env.send([0], 2)
    env.pause([1])
    for call in (env.send, env.step):
        with pytest.raises(EnvBusyError, match=IN_FLIGHT):
            call([0, 0], [2, 3])
        with pytest.raises(EnvBusyError, match=r"envs \[1\] are paused. Call resume\(\[1\]\)"):
            call([0, 0], [0, 1])
    env.resume()
    assert env.recv().env_ids.tolist() == [2]
    assert env.get_env_attr("count") == [0, 0, 1, 0]


def test_every_call_after_close_is_refused(env: ParallelEnv) -> None:
    env.close()
    env.close()
    calls: dict[str, list[Any]] = {
        **{"reset": [], "recv": [], "render": [], "resume": [], "step": [[0] * 4], "send": [[0] * 4], "seed": [1]},
        **{"pause": [0], "restart": [0], "customized_method": ["name"]},
        **{"get_env_attr": ["count"], "set_env_attr": ["count", 1]},
    }
    for name, arguments in calls.items():
        with pytest.raises(ClosedError, match=rf"^{name}\(\) was called on a closed ParallelEnv"):
            getattr(env, name)(*arguments)
    assert env.closed


def test_every_error_derives_from_parallel_env_error() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) > 20
    assert all(issubclass(error, ParallelEnvError | Warning) for error in found)


def test_missing_package_error_explains_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RAY, None)  # this is how the import system marks an absent package
    with pytest.raises(MissingDependencyError, match="pip install ray"):
        ParallelEnv(TOOLBOXES, RAY)


def test_messages_abbreviate_long_lists_of_envs(make_env: MakeEnv) -> None:
    env = make_env([Toolbox] * 40, num_cpus=2)
    with pytest.raises(ResetNeeded, match=r"^envs \[0, 1, 2, \.\.\., 39\] have no .* reset\(\[0, 1, 2, \.\.\., 39\]\)"):
        env.step([1] * 40)
    env.pause(range(16))
    with pytest.raises(EnvBusyError, match=r"envs \[0, 1, [\d, ]*14, 15\] are paused"):
        env.step([1] * 16, range(16))


# ---------------------------------------------------------------- values in messages


class Tensor:
    """Looks like a tensor of another library."""

    shape, dtype = (50, 2), "torch.float32"

    def __array__(self) -> Any:
        raise AssertionError("was not asked for")


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([0, 7], "[0, 7]"),
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
        (np.array([0, 7]), "array([0, 7])"),
        (np.zeros((100, 30)), "<ndarray of shape (100, 30) and dtype float64>"),
        (Tensor(), "<Tensor of shape (50, 2) and dtype torch.float32>"),
        ({"x": np.zeros((100, 30))}, "{'x': <ndarray of shape (100, 30) and dtype float64>}"),
        ([[0.25, 0.5]] * 100, "<list of 100 items>"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...]"),
        (gym.spaces.Box(0, 1, (2,), np.float64), "Box(0.0, 1.0, (2,), float64)"),
        ("x" * 500, "'" + "x" * 76 + "..."),
        (Broken(), "<Broken"),
        (10**5000, "<int>"),
        ({}, "{}"),
    ],
    ids=itertools.count(),
)
def test_messages_abbreviate_long_values(value: Any, shown: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        ParallelEnv([Toolbox], nonsense=value)
    assert str(caught.value).startswith(f"nonsense={shown}")
    assert len(str(caught.value).partition(" is not an option")[0]) <= 100


def test_messages_do_not_print_large_arrays() -> None:
    population: Any = np.full((500, 40), 0.125)
    with ParallelEnv([Toolbox] * 2) as env:
        calls: dict[str, Callable[[], Any]] = {
            "id": lambda: env.get_env_attr("number", id=population),
            "seed": lambda: env.seed([population, population]),
            "options": lambda: env.reset(options=[{"x": population}, population]),
            "data": lambda: env.customized_method("take", [population, population]),
            "function_args_list": lambda: env.call("take", [population, population]),
            "action": lambda: env.send_action(1, population),
        }
        for name, call in calls.items():
            with pytest.raises(ParallelEnvError) as caught:
                call()
            assert "0.125" not in str(caught.value), name
            assert len(str(caught.value)) < 400, name


PAIR = (
    r"reset\(\) returns the states alone, not Gymnasium's pair, and nothing was reset: .*env\.reset_infos.*to_gymnasium"
)


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_unpacking_reset_like_gymnasium_is_refused(make_env: MakeEnv, num_envs: int) -> None:
    env = make_env([Toolbox] * num_envs)
    pairs = ["obs, info", "states, reset_infos", "self.obs, self.info", "self.obs, info", "obs, self.info"]
    if num_envs != 2:
        pairs += ["first, _", "self.first, _", "both[0], both[1]", "a, (b, c)", "(a, b), c"]
    for targets, call in itertools.product(pairs, ["reset()", "reset(seed=3)", "reset(None, seed=self.seed)"]):
        for one in (env, ParallelWrapper(env)):
            names = {"env": one, "self": SimpleNamespace(seed=3), "both": [0, 0]}
            line = f"{targets} = env.{call}"
            for code in (line, f"def begin(self, both):\n    {line}\nbegin(self, both)"):
                with pytest.raises(ArgumentError, match=PAIR):
                    exec(code, {**names})
                with traced(), pytest.raises(ArgumentError, match=PAIR):
                    exec(code, {**names})
    with pytest.raises(ResetNeeded):
        env.step([1] * num_envs)  # nothing was reset
    assert len(env.reset()) == num_envs


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Trace every instruction, as debuggers and tools that measure coverage do."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("num_envs", "code"),
    [
        (2, "a, b = env.reset()"),
        (2, "a, _ = env.reset(seed=[1, 2])"),
        (2, "a, (b, *info) = env.reset()"),
        (2, "(a, *info), b = env.reset()"),
        (2, "info, a = env.reset()"),
        (2, "a, b = info = env.reset()"),
        (2, "a, both[info] = env.reset()"),
        (2, "a, b = env.reset(); c, info = b, a"),
        (2, "a, b = env.reset(); info = 3"),
        (2, "for a, info in zip(*[env.reset()] * 2): pass"),
        (3, "a, b = list(map(reset, [env, env]))"),
        (3, "a, b = map(reset, [env, env])"),
        (3, "a, b = tuple(env.reset() for _ in range(2))"),
        (3, "a, b = [env.reset(), env.reset()]"),
        (3, "a, b = env.reset(), env.reset()"),
        (3, "a, info = twice(env.reset)"),
        (3, "a, info = sorted([1, 2], key=lambda _: env.reset() is None)"),
        (3, "a, *info = env.reset()"),
        (3, "a, b, c = env.reset()"),
        (3, "a, info = env.reset, 3"),
        (3, "states = env.reset(); a, info = 1, 2"),
        (3, "a, info = gym.reset()"),
        (3, "a, info = gymnasium_reset()"),
    ],
)
def test_code_that_does_not_unpack_a_pair_is_not_refused(num_envs: int, code: str) -> None:
    class Pairing(ParallelEnv):
        def gymnasium_reset(self) -> Any:
            return super().reset(), self.reset_infos

    with Pairing([Toolbox] * num_envs) as env:
        reset = operator.methodcaller("reset")
        gym = SimpleNamespace(reset=functools.wraps(env.reset)(lambda: (env.reset(), {})))
        helpers = {"twice": lambda call: (call(), call()), "gymnasium_reset": env.gymnasium_reset, "gym": gym}
        names = {"env": env, "reset": reset, "both": {}, "info": 0, **helpers}
        function = f"def begin(info=0):\n    {code}\nbegin()"
        for one in (code, function, code.replace("reset, [env", "ParallelEnv.reset, [env")):
            exec(one, {**names, "ParallelEnv": ParallelEnv})
            with traced():
                exec(one, {**names, "ParallelEnv": ParallelEnv})


def test_states_of_two_envs_may_be_unpacked() -> None:
    with ParallelEnv([Toolbox] * 2) as env:
        first, second = env.reset(seed=[1, 1])
        assert (first == second).all()
        both = [None, None]
        both[0], both[1] = env.reset(seed=[1, 1])
        assert (both[0] == first).all()
    with ParallelEnv([Pair] * 3) as env:
        for one in (env, ParallelWrapper(env)):
            numbers, _ = one.reset()
            assert numbers.shape == (3,)
