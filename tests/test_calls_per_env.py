"""`call`, `attr` and `command`, with different arguments for each env."""

from __future__ import annotations

import functools
import threading
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.wrappers import TimeLimit
from interrupting import Counting
from modes import here_and_in_processes

from parallelenv.errors import (
    AbsentAttributeError,
    AbsentAttributeWarning,
    ArgumentError,
    IdRangeError,
    UnpicklableError,
)
from parallelenv.testing.envs import Component, Toolbox

pytestmark = here_and_in_processes


class Asked(Toolbox):
    def add(self, one: Any, other: Any = 0) -> Any:
        return self.number + one + other

    def keep(self, notes: list[Any]) -> list[Any]:
        notes.append(self.number)
        self.notes = notes
        return notes

    def fail(self) -> None:
        if self.number == 1:
            raise ZeroDivisionError("by env 1")

    def command(self, name: str, data: Any) -> Any:
        return f"{name} {self.number}", data


@pytest.fixture
def env(make_env: MakeEnv) -> Any:
    return make_env([partial(Asked, number) for number in range(4)], num_cpus=2)


def test_call_attr_and_command_accept_ids_and_one_name_for_all_or_one_per_env(env: Any) -> None:
    assert env.call("add", [[1], (2, 3), {"one": 4, "other": 5}, [0]]) == [1, 6, 11, 3]
    assert env.call(["add", "part.double"], [[10], [20]], id=[0, 2]) == [10, 400]
    assert env.call("fail", id=[3, 0]) == [None, None]
    assert env.call("keep", [[[]], [[]]], id=[True, False, True, False]) == [[0], [2]]
    for id in (3, [3], slice(3, 4), np.int64(3)):
        assert env.call("add", [[1]], id=id) == env.call(["add"], [[1]], id=id) == [4]
        assert env.attr("number", id) == env.attr(["number"], id) == [3]
        assert env.command("go", {"far": 1}, id) == [("go 3", {"far": 1})]
    assert env.command("go") == [(f"go {number}", None) for number in range(4)]


def test_attr_raises_for_absent_attributes(env: Any) -> None:
    assert env.attr("number") == [0, 1, 2, 3]
    assert env.attr(["part.level", "number"], id=[1, 2]) == [10, 2]
    with pytest.raises(AbsentAttributeError, match="Asked has no attribute 'nothing'") as caught:
        env.attr(["number", "nothing", "number", "number"])
    assert caught.value.partial == {0: 0, 2: 2, 3: 3}  # type: ignore[attr-defined]
    assert "env 1" in caught.value.__notes__[0]


class Secretive(Asked):
    """Env 1 has a value that cannot be copied, and env 3 has none."""

    def prepare(self) -> None:
        super().prepare()
        if self.number != 3:
            self.secret: Any = threading.Lock() if self.number == 1 else self.number


def test_failed_look_up_has_values_of_other_envs_in_partial(make_env: MakeEnv) -> None:
    env = make_env([partial(Secretive, number) for number in range(4)], num_cpus=2)
    with pytest.raises(UnpicklableError, match="lock") as caught:
        env.get_env_attr("secret", default=-1)
    assert caught.value.partial == {0: 0, 2: 2, 3: -1}  # type: ignore[attr-defined]
    adapted: Any = env.to_tianshou()
    with pytest.raises(UnpicklableError, match="lock") as caught:
        adapted.get_env_attr("secret")
    assert caught.value.partial == {0: 0, 2: 2, 3: None}  # type: ignore[attr-defined]


def test_misspelt_attribute_warns_once_and_at_the_users_line(env: Any) -> None:
    def read() -> Any:
        return env.get_env_attr("numbr")

    def set() -> None:
        env.set_env_attr("part.levl", 1)

    def set_through_an_adapter() -> None:
        env.to_gymnasium().set_attr("numbr", 1)

    for call, near in ((read, "number"), (set, "level"), (set_through_an_adapter, "number")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                assert call() == ([None] * 4 if call is read else None)
        (warning,) = caught
        assert warning.category is AbsentAttributeWarning
        assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno + 1)
        assert str(warning.message).count(f"Did you mean '{near}'?") == 1


def test_attribute_that_may_be_absent_does_not_warn(env: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env.get_env_attr("numbr", default=None) == [None] * 4
        assert env.get_env_attr("nothing_like_it") == [None] * 4
        env.set_env_attr("nothing_like_it", 1)
        env.set_env_attr("number", 1)
        with pytest.raises(AbsentAttributeWarning, match="'numbr' was set as a new attribute"):
            env.set_env_attr("numbr", 1, 2)
        assert env.get_env_attr("numbr") == [None, None, 1, None]
        env.set_env_attr("numbr", 1)  # env 2 has it


def test_misspelt_method_error_suggests_the_correct_name(env: Any) -> None:
    for name, near in (("ad", "add"), ("part.doubl", "double"), ("prt.double", "part")):
        with pytest.raises(AbsentAttributeError, match=rf"has no method '{name}'.* Did you mean '{near}'\?") as caught:
            env.customized_method(name, id=[2])
        assert "Raised by env 2" in "".join(caught.value.__notes__)
    with pytest.raises(AbsentAttributeError, match=r"Did you mean 'number'\?"):
        env.attr("numbr")


def test_failed_call_has_other_return_values_in_partial(env: Any) -> None:
    with pytest.raises(ZeroDivisionError, match="by env 1") as caught:
        env.call(["add", "fail", "fail", "add"], [[1], None, None, [1]])
    assert caught.value.partial == {0: 1, 2: None, 3: 4}  # type: ignore[attr-defined]
    with pytest.raises(AbsentAttributeError, match=r"Read it with get_env_attr\('number'\)"):
        env.call("number")


def test_invalid_arguments_are_refused_and_no_env_is_called(env: Any) -> None:
    ways: list[tuple[Any, str]] = [
        (lambda: env.call(["add"] * 3), "function_names has 3 items for 4 envs"),
        (lambda: env.call(3), "function_names=3 cannot be spread over envs. Give a name for all envs"),
        (lambda: env.call(["add", "add", "a b", "add"]), "function_names='a b' is not a valid name"),
        (lambda: env.call("__class__"), "double-underscore"),
        (lambda: env.call("keep", [[[]]]), "function_args_list has 1 item for 4 envs"),
        (lambda: env.call("keep", {"notes": []}), "function_args_list={'notes': .*Give a list with one item per env"),
        (lambda: env.call("keep", [[[]], [[]], [[]], 3]), "function_args_list contains 3. Each item must be a list or"),
        (lambda: env.call("keep", [[[]], [[]], [[]], {1: []}]), "function_args_list contains {1: "),
        (lambda: env.attr(["number"] * 5), "names has 5 items for 4 envs"),
        (lambda: env.attr("a.b c"), "names='a.b c' is not a valid name"),
        (lambda: env.command(3), "name=3 is not the name of a command"),
    ]
    for way, message in ways:
        with pytest.raises(ArgumentError, match=message):
            way()
    with pytest.raises(IdRangeError):
        env.call("keep", [[[]]], id=4)
    assert env.attr("notes") == [[]] * 4


class Finds(Counting):
    """An env of several parts, which reads and sets their attributes itself."""

    budget = 100

    def __init__(self, number: int) -> None:
        self.part = Component(2)
        self.part.cost = [float(number)]  # type: ignore[attr-defined]
        self.asked: list[str] = []

    def get_env_attr(self, key: str) -> Any:
        self.asked.append(key)
        return getattr(self.part, key) if key != "wrong" else 1 / 0

    def set_env_attr(self, key: str, value: Any) -> None:
        if not hasattr(self.part, key):
            raise LookupError(f"no part has {key!r}")
        setattr(self.part, key, value)


class SaysNone(Finds):
    def get_env_attr(self, key: str) -> Any:
        return getattr(self.part, key, None) if key != "wrong" else 1 / 0


def wrapped_finds(number: int) -> Any:
    return TimeLimit(Finds(number), 5)


@pytest.fixture(params=[Finds, SaysNone, wrapped_finds])
def parts(make_env: MakeEnv, request: pytest.FixtureRequest) -> Any:
    return make_env([partial(request.param, number) for number in range(4)], num_cpus=2)


def test_get_env_attr_falls_back_to_the_lookup_of_the_env(parts: Any) -> None:
    assert parts.get_env_attr("cost") == [[0.0], [1.0], [2.0], [3.0]]
    assert parts.attr("cost", [3, 1]) == [[3.0], [1.0]]
    assert parts.get_env_attr("budget") == [100] * 4
    assert parts.customized_method("double", {"by": 4}) == [8] * 4
    assert parts.get_env_attr("nothing") == [None] * 4
    assert parts.get_env_attr("nothing", default=5, id=2) == [5]
    assert "budget" not in parts.get_env_attr("asked", 0)[0]
    with pytest.raises(AbsentAttributeError, match="has no attribute 'nothing'"):
        parts.attr("nothing")
    with pytest.raises(ZeroDivisionError):
        parts.get_env_attr("wrong")
    with pytest.warns(AbsentAttributeWarning, match=r"Did you mean 'budget'\?"):
        assert parts.get_env_attr("budgt") == [None] * 4


def test_set_env_attr_falls_back_to_the_setter_of_the_env(parts: Any) -> None:
    parts.set_env_attr("cost", 7.0, id=[1, 2])
    assert parts.get_env_attr("part.cost") == [[0.0], 7.0, 7.0, [3.0]]
    parts.set_env_attr("budget", 5)
    assert parts.get_env_attr("budget") == [5] * 4
    with pytest.raises(LookupError, match="no part has 'unheard'") as caught:
        parts.set_env_attr("unheard", 1, id=3)
    assert "env 3" in "".join(caught.value.__notes__)


def test_list_passed_to_set_env_attr_has_one_item_per_env_and_an_array_that_could_have_is_refused(env: Any) -> None:
    env.set_env_attr("number", [10, 20], [1, 3])
    assert env.attr("number") == [0, 10, 2, 20]
    env.set_env_attr("number", (1, 2, 3, 4))
    assert env.attr("number") == [1, 2, 3, 4]
    env.set_env_attr("notes", values=[[5, 6]] * 4)
    assert env.attr("notes") == [[5, 6]] * 4
    for value, size in (([5, 6], 2), ((5,), 1), ([], 0)):
        with pytest.raises(ArgumentError, match=rf"of {size} items? for 4 envs.*values=\[\.\.\.\].*\[value\] \* n"):
            env.set_env_attr("notes", value)
    assert env.attr("notes") == [[5, 6]] * 4
    for array in (np.arange(3), np.float64(2.0), np.array(3.0), np.zeros((2, 4))):
        env.set_env_attr("notes", array)
        assert all(np.array_equal(one, array) for one in env.attr("notes"))
    for array in (np.zeros(4), np.zeros((4, 2))):
        with pytest.raises(ArgumentError, match=r"one row for each, or all of it.*values=\[\.\.\.\].*\[value\] \* n"):
            env.set_env_attr("notes", array)
    env.set_env_attr("notes", np.zeros(1), id=2)
    assert env.attr("notes", 2) == [np.zeros(1)]


class Sensor:
    @property
    def heat(self) -> float:
        return self.het  # type: ignore[attr-defined, no-any-return]


class Typo(Asked):
    """Env 1 has properties with mistakes. The other envs lack the attribute that env 1 misspells."""

    sensor = Sensor()

    @property
    def total(self) -> int:
        return self.number if self.number != 1 else self.totl

    @functools.cached_property
    def spread(self) -> int:
        if self.number == 1:
            raise AttributeError("spread is not measured yet")
        return self.number

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Typo lacks {name}")  # would replace the error of the property


class PassesOn:
    """A wrapper of no library: it passes on what it lacks, and some of it in properties."""

    def __init__(self, env: Any) -> None:
        self.env = env

    total = property(lambda self: self.env.total)
    observation_space = property(lambda self: self.env.observation_space)
    action_space = property(lambda self: self.env.action_space)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **options: Any) -> Any:
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


WRAPPERS: list[Any] = [lambda env: env, partial(TimeLimit, max_episode_steps=5), PassesOn]


def wrapped(wrap: Any, kind: Any, *arguments: Any) -> Any:
    return wrap(kind(*arguments))


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["bare", "TimeLimit", "PassesOn"])
def test_attribute_error_in_a_property_is_an_error_of_that_env(make_env: MakeEnv, wrap: Any) -> None:
    env = make_env([partial(wrapped, wrap, Typo, number) for number in range(4)], num_cpus=2)
    ways: dict[str, tuple[Any, str]] = {
        "get_env_attr": (lambda: env.get_env_attr("total", default=9), "lacks totl"),
        "attr": (lambda: env.attr("total"), "lacks totl"),
        "call": (lambda: env.customized_method("total.bit_length"), "lacks totl"),
        "cached": (lambda: env.get_env_attr("spread"), "not measured yet"),
    }
    for name, (way, text) in ways.items():
        key = "spread" if name == "cached" else "total"
        doing = "total.bit_length()" if name == "call" else f"the lookup of '{key}'"
        with pytest.raises(AttributeError, match=text) as caught:
            way()
        assert not isinstance(caught.value, AbsentAttributeError), name
        assert f"env 1 in {doing}, " in caught.value.__notes__[0]
        assert caught.value.partial.keys() == {0, 2, 3}  # type: ignore[attr-defined]
    assert env.get_env_attr("total", [0, 2, 3]) == env.get_env_attr("spread", [0, 2, 3]) == [0, 2, 3]
    with pytest.raises(AttributeError, match="no attribute 'het'"):
        env.get_env_attr("sensor.heat", default=0.0)


class Spaceless(gymnasium.Env[Any, Any]):
    __slots__ = ("late",)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["bare", "TimeLimit", "PassesOn"])
def test_what_no_layer_has_is_absent_although_wrappers_pass_it_on(make_env: MakeEnv, wrap: Any) -> None:
    env = make_env([partial(wrapped, wrap, Spaceless)] * 2, num_cpus=2)
    env.reset(seed=3)
    assert env.single_observation_space is None
    for key in ("observation_space", "late", "total", "late.part", "observation_space.shape"):
        assert env.get_env_attr(key, default=5) == [5, 5], key
    assert len(env.get_env_attr("_np_random.bit_generator.state")) == 2  # which `gymnasium.Wrapper` hides


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["bare", "TimeLimit", "PassesOn"])
@pytest.mark.parametrize("name", ["observation_space", "metadata", "render_mode"])
def test_env_whose_declaration_fails_is_not_taken_for_one_that_declares_nothing(
    make_env: MakeEnv, wrap: Any, name: str
) -> None:
    failing = type("Failing", (Asked,), {name: property(lambda self: self.declard)})
    with pytest.raises(AttributeError, match="no attribute 'declard'") as caught:
        make_env([partial(Asked, 0), partial(wrapped, wrap, failing, 1)])
    assert "env 1" in "".join(caught.value.__notes__)


class Recorded(Asked):
    """Records the reads and writes of its properties."""

    budget = 100

    def prepare(self) -> None:
        super().prepare()
        self.events: list[Any] = []
        self.room = 1

    @property
    def dial(self) -> int:
        self.events.append("read")
        return 1

    @dial.setter
    def dial(self, value: int) -> None:
        self.events.append(value)

    @property
    def fixed(self) -> int:
        self.events.append("read")
        return 1

    def room_and_budget(self) -> tuple[int, int]:
        return self.room, self.budget


class Slotted(Recorded):
    __slots__ = ("late",)

    def set_env_attr(self, key: str, value: Any) -> None:
        self.events.append((key, value))


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["bare", "TimeLimit", "PassesOn"])
@pytest.mark.parametrize("kind", [Recorded, Slotted])
def test_set_env_attr_reads_no_property_and_sets_where_the_attribute_is(
    make_env: MakeEnv, wrap: Any, kind: Any
) -> None:
    env = make_env([partial(wrapped, wrap, kind, number) for number in range(2)], num_cpus=2)
    env.set_env_attr("dial", 5)
    env.set_env_attr("unwrapped.dial" if wrap is not WRAPPERS[2] else "env.dial", 6)
    with pytest.raises(AttributeError, match=r"property 'fixed' of .* has no setter") as caught:
        env.set_env_attr("fixed", 5, id=1)
    assert "env 1" in "".join(caught.value.__notes__)
    assert env.get_env_attr("events") == [[5, 6]] * 2
    env.set_env_attr("room", 2)
    env.set_env_attr("budget", 3)
    assert env.call("room_and_budget") == [(2, 3)] * 2  # of the env itself, not of a wrapper that passes it on
    env.set_env_attr("late", 4)
    assert env.get_env_attr("late") == [4, 4]
    env.set_env_attr("other", 7)
    assert env.get_env_attr("events", 0)[0][2:] == ([("other", 7)] if kind is Slotted else [])


class Unit:
    """An object that plays episodes itself: it has neither `reset` nor `step`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inner = Asked(number)

    def run_batch_episode(self) -> dict[str, int]:
        return {"number": self.number}


class Own(Toolbox):
    """Names itself, as a class that mixes env and trainer may do."""

    def prepare(self) -> None:
        super().prepare()
        self.env = self


def test_env_that_is_its_own_env_attribute_can_be_asked(make_env: MakeEnv) -> None:
    env = make_env([Own, Own], num_cpus=2)
    assert env.get_env_attr("absent", default=3) == [3, 3]
    env.set_env_attr("length", 9)
    assert env.get_env_attr("env.length") == [9, 9]


def test_object_without_step_supports_calls_and_attributes(make_env: MakeEnv) -> None:
    env = make_env([Unit(0), partial(Unit, 1), Unit(2)], num_cpus=2)
    assert env.rollout() == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert env.rollout(id=[2, 0]) == [{"number": 2}, {"number": 0}]
    assert env.get_env_attr("inner.number") == [0, 1, 2]
    env.set_env_attr("number", 7, id=1)
    assert env.customized_method("run_batch_episode", id=1) == [{"number": 7}]
    assert env.call("inner.add", [[1]] * 3) == [1, 2, 3]


def test_object_without_step_cannot_be_reset_or_stepped(make_env: MakeEnv) -> None:
    env = make_env([Component(1), partial(Asked, 1), partial(Component, 2)], asynchronous="restart")
    calls: dict[str, Any] = {
        "reset": env.reset,
        "step": lambda: env.step([0, 0, 0]),
        "send": lambda: env.send([0, 0, 0]),
        "send_reset": env.send_reset,
        "rollout": lambda: env.rollout(lambda states: [0] * len(states), 3),
        "run_episodes": lambda: env.run_episodes(lambda states: [0] * len(states), 3),
    }
    for name, call in calls.items():
        with pytest.raises(AbsentAttributeError, match=r"envs \[0, 2\] lack reset\(\) or step\(\).*as id="):
            call()
        assert env.attr("notes", 1) == [[]], name
    env.reset(1)
    assert env.step([0], 1).dones.tolist() == [False]
    assert env.customized_method("double", {"by": 4}, [2, 0]) == [8, 4]


def test_object_without_step_never_needs_a_reset(make_env: MakeEnv) -> None:
    env = make_env([Component(1), partial(Asked, 1), partial(Component, 2)])
    state = env.save_state()
    assert env.load_state(state) == (1,)
    env.reset(1)
    assert env.load_state(env.save_state()) == ()
    assert env.load_state(state) == (1,)
    assert env._repr_mimebundle_()["text/plain"].splitlines()[1].split(None, 1)[1] == "1 needs reset, 2 for calls only"
    assert env.load_state(replace(state, envs=(None, *state.envs[1:]))) == (0, 1)  # which could not be saved


def test_rollout_without_policy_names_the_missing_method(make_env: MakeEnv) -> None:
    env: Any = make_env([Unit(0), Component(1)])
    message = r"rollout\(policy, num_steps=.*run_batch_episode\(\).*envs \[1\] have none"
    with pytest.raises(ArgumentError, match=message):
        env.rollout()
    with pytest.raises(ArgumentError, match=r"without a policy.*takes no arguments"):
        env.rollout(None, num_steps=3, id=0)
