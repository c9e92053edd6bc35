"""Random sequences of calls: results in every mode equal those of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import needs_ray, require_mode
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from modes import ORACLE
from samplers import Walks

from parallelenv import Evaluation, ParallelEnv, Rollout, TaskPool, registry
from parallelenv.errors import ParallelEnvError
from parallelenv.testing.contract import DONE_POLICIES, LENGTHS, NUM_ENVS, assert_same, drain, five_env_fns, items
from parallelenv.testing.envs import Toolbox

env_ids = st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, max_size=NUM_ENVS, unique=True)
seeds = st.none() | st.integers(0, 99)
values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
action = st.lists(st.integers(0, 4), min_size=NUM_ENVS, max_size=NUM_ENVS)


class Spaceless(Toolbox):
    """Declares no spaces: its states and actions are sent as objects."""

    observation_space: Any = None
    action_space: Any = None


class Twins:
    """The same envs in two modes, of which the second is the oracle.

    Args:
        make: Makes them in a mode.
        prepare: Brings them into the same state, if nothing is in flight.
        mode: The first mode.
    """

    def __init__(self, make: Callable[[str], ParallelEnv], prepare: Callable[[ParallelEnv], None], mode: str) -> None:
        self._make, self._prepare, self._mode = make, prepare, mode
        self.is_sound = False
        self._made: list[ParallelEnv] = []

    def begin(self) -> None:
        """Bring both into the same state; they are rebuilt only after a failure."""
        if not self.is_sound:
            self.close()
            self._made = [self._make(self._mode), self._make(ORACLE)]
            self.oracle.engine.plans_steps = False
            self.is_sound = True
        for env in self._made:
            drain(env)
            env.resume()
            self._prepare(env)

    @property
    def one(self) -> ParallelEnv:
        return self._made[0]

    @property
    def oracle(self) -> ParallelEnv:
        return self._made[1]

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Record whether the block fails."""
        self.is_sound = False
        yield
        self.is_sound = True

    def close(self) -> None:
        for env in self._made:
            env.close()


def _outcome(env: ParallelEnv, call: str, *arguments: Any, **keywords: Any) -> Any:
    """Return the result of a call, or its error."""
    try:
        answer = getattr(env, call)(*arguments, **keywords)
        return items(vars(answer) if isinstance(answer, Evaluation | Rollout) else answer)
    except ParallelEnvError as error:
        return type(error).__name__, items(getattr(error, "partial", None))


def act(states: Any) -> Any:
    return [int(state[1]) % 5 for state in (states["place"] if isinstance(states, dict) else states)]


class Machine(RuleBasedStateMachine):
    """Makes the same calls on both twins and compares the results."""

    twins: ClassVar[Twins]

    def __init__(self) -> None:
        super().__init__()
        self.twins.begin()
        self.in_flight: set[int] = set()
        self.unpaused = set(range(NUM_ENVS))

    def both(self, call: str, *arguments: Any, **keywords: Any) -> Any:
        """Make a call on both; return the result."""
        with self.twins.compared():
            expected = _outcome(self.twins.oracle, call, *arguments, **keywords)
            found = _outcome(self.twins.one, call, *arguments, **keywords)
            assert_same(expected, found, f"{call}{arguments}{keywords} ")
            assert_same(self.twins.oracle.done, self.twins.one.done, "done")
        return found

    @rule(env_ids=st.none() | env_ids, seed=seeds)
    def reset(self, env_ids: Any, seed: Any) -> None:
        self.both("reset", env_ids, seed=seed)
        self.in_flight -= self.unpaused if env_ids is None else set(env_ids)

    @rule(env_ids=st.none() | env_ids, seed=seeds)
    def send_reset(self, env_ids: Any, seed: Any) -> None:
        self.both("send_reset", env_ids, seed=seed)
        self.in_flight |= self.unpaused if env_ids is None else set(env_ids)

    @rule(env_ids=st.none() | env_ids, action=action, align=st.sampled_from(["item", "batch"]))
    def step(self, env_ids: Any, action: list[int], align: str) -> None:
        self.both("step", np.array(action[: len(self.unpaused if env_ids is None else env_ids)]), env_ids, align=align)

    @rule(env_ids=env_ids, action=action)
    def send(self, env_ids: list[int], action: list[int]) -> None:
        if self.both("send", action[: len(env_ids)], env_ids) is None:  # it was not refused
            self.in_flight.update(env_ids)

    @precondition(lambda self: self.in_flight)
    @rule()
    def receive(self) -> None:
        with self.twins.compared():
            expected, found = drain(self.twins.oracle), drain(self.twins.one, max_envs=2)
            assert found.keys() == self.in_flight
            assert_same(expected, found, "received ")
            assert_same(self.twins.oracle.done, self.twins.one.done, "done")
            assert_same(self.twins.oracle.reset_infos, self.twins.one.reset_infos, "reset_infos")
        self.in_flight.clear()

    @precondition(lambda self: not self.in_flight)
    @rule(env_ids=st.none() | env_ids, num_steps=st.integers(1, 9))
    def rollout(self, env_ids: Any, num_steps: int) -> None:
        self.both("rollout", act, num_steps, id=env_ids, progress=False)

    @precondition(lambda self: not self.in_flight)
    @rule(env_ids=st.none() | env_ids, num_episodes=st.integers(1, 7), seed=seeds)
    def run_episodes(self, env_ids: Any, num_episodes: int, seed: Any) -> None:
        self.both("run_episodes", act, num_episodes, env_ids, seed=seed, progress=False)

    @precondition(lambda self: not self.in_flight)
    @rule(env_ids=env_ids, seed=st.integers(0, 99))
    def restart(self, env_ids: list[int], seed: int) -> None:
        self.both("restart", env_ids)
        self.both("step", [0] * len(self.unpaused))
        self.both("reset", env_ids, seed=seed)

    @rule(env_ids=env_ids)
    def pause(self, env_ids: list[int]) -> None:
        self.both("pause", env_ids)
        self.unpaused.difference_update(env_ids)

    @rule(env_ids=st.none() | env_ids)
    def resume(self, env_ids: Any) -> None:
        self.both("resume", env_ids)
        self.unpaused.update(range(NUM_ENVS) if env_ids is None else env_ids)

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        """Make one of the `calls`."""
        name = data.draw(st.sampled_from([*self.calls]))
        self.both(name, *data.draw(self.calls[name]))

    calls: ClassVar[dict[str, st.SearchStrategy[Any]]] = {"seed": st.tuples(st.integers(0, 99))}


some = st.none() | env_ids
names = st.sampled_from(["name", "own_box", "uncopyable", "part.double", "notes.clear", "nowhere"])
boxes = st.lists(values, min_size=NUM_ENVS, max_size=NUM_ENVS)


class ToolboxMachine(Machine):
    """Also sets attributes and calls methods."""

    calls: ClassVar[dict[str, st.SearchStrategy[Any]]] = {
        **Machine.calls,
        "get_env_attr": st.tuples(st.sampled_from(["box", "count", "part.level", "nowhere"]), some, values),
        "set_env_attr": st.tuples(st.just("length"), st.integers(1, 6), some),
        "customized_method": st.tuples(names, st.none(), some),
    }

    @rule(env_ids=env_ids, values=boxes)
    def set_each(self, env_ids: list[int], values: list[Any]) -> None:
        self.both("set_env_attr", "box", id=env_ids, values=values[: len(env_ids)])


class TaskMachine(Machine):
    """Also calls the methods of task pools."""

    calls: ClassVar[dict[str, st.SearchStrategy[Any]]] = {
        **Machine.calls,
        "set_seeds": st.tuples(st.integers(0, 99) | st.lists(seeds, min_size=NUM_ENVS, max_size=NUM_ENVS)),
        "get_observations": st.tuples(some),
        "attr": st.tuples(st.sampled_from(["task.number", "sampler.given", "nowhere"]), some),
        "command": st.tuples(st.just("turn"), st.just([1, 2]), env_ids),
    }

    @rule(env_ids=st.none() | env_ids, arguments=st.sampled_from([{}, {"length": 2}]))
    def next_task(self, env_ids: Any, arguments: dict[str, Any]) -> None:
        self.both("next_task", env_ids, **arguments)
        self.in_flight -= self.unpaused if env_ids is None else set(env_ids)

    @rule()
    def reset_all(self) -> None:
        self.both("reset_all")
        self.in_flight.clear()


def prepare_toolboxes(env: ParallelEnv) -> None:
    env.reset(seed=0)
    env.set_env_attr("box", None)
    env.set_env_attr("notes", values=[[]] * len(env))
    env.set_env_attr("length", values=LENGTHS)


def prepare_samplers(env: ParallelEnv) -> None:
    assert isinstance(env, TaskPool)
    env.reset_all()
    env.reset(seed=0)


def run(machine_type: type[Machine], twins: Twins, mode: str, number: int) -> None:
    machine = seed(number)(type("TwinMachine", (machine_type,), {"twins": twins}))  # each has its own sequences
    with closing(twins):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=settings().max_examples // (20 if needs_ray(mode) else 5),
                stateful_step_count=30,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )


in_other_modes = pytest.mark.parametrize("word", [word for word in registry.known_modes() if word != ORACLE])


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
@in_other_modes
def test_any_sequence_of_calls_equals_the_oracle(word: str, done_policy: Any, request: pytest.FixtureRequest) -> None:
    mode = require_mode(word, request)
    row, column = registry.known_modes().index(word), DONE_POLICIES.index(done_policy)
    kind, num_cpus = (Toolbox, Spaceless)[(row + column) % 2], 2 + column // 2

    def make(word: str) -> ParallelEnv:
        return ParallelEnv(five_env_fns(kind), word, done_policy, num_cpus=num_cpus)

    run(ToolboxMachine, Twins(make, prepare_toolboxes, mode), mode, row * len(DONE_POLICIES) + column)


@pytest.mark.parametrize("auto", [True, False])
@in_other_modes
def test_any_sequence_of_sampler_calls_equals_the_oracle(word: str, auto: bool, request: pytest.FixtureRequest) -> None:
    mode = require_mode(word, request)
    kind = "plain" if auto else "sheet"
    arguments = [{"total": total, "kind": kind} for total in (2, 6, 1, 4, 3)]

    def make(word: str) -> ParallelEnv:
        return ParallelEnv.from_samplers(Walks, arguments, word, auto, num_cpus=2)

    run(TaskMachine, Twins(make, prepare_samplers, mode), mode, 100 + int(auto))
