"""Random sequences of calls: results in every mode equal those of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import needs_ray, require_mode
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from modes import ORACLE
from samplers import Walks

from parallelenv import Evaluation, ParallelEnv, Rollout, registry
from parallelenv.errors import ParallelEnvError
from parallelenv.testing.contract import DONE_POLICIES, LENGTHS, NUM_ENVS, assert_same, drain, five_env_fns, items
from parallelenv.testing.envs import Toolbox

env_ids = st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, max_size=NUM_ENVS, unique=True)
some = st.none() | env_ids
seeds = st.none() | st.integers(0, 99)
values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
action = st.lists(st.integers(0, 4), min_size=NUM_ENVS, max_size=NUM_ENVS)


class Spaceless(Toolbox):
    """Declares no spaces: its states and actions are sent as objects."""

    observation_space: Any = None
    action_space: Any = None


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
    """Makes the same calls on envs in a mode and on those of the oracle, and compares the results."""

    mode: ClassVar[str]
    make: ClassVar[Any]
    made: ClassVar[list[ParallelEnv]]

    def __init__(self) -> None:
        super().__init__()
        if not self.made:
            self.made.extend([self.make(self.mode), self.make(ORACLE)])
            self.made[1].engine.plans_steps = False
        self.one, self.oracle = self.made
        for env in self.made:
            drain(env)
            env.resume()
            self.prepare(env)
        self.in_flight: set[int] = set()
        self.unpaused = set(range(NUM_ENVS))

    def prepare(self, env: ParallelEnv) -> None:
        """Bring envs into the state from which the calls start."""
        raise NotImplementedError

    @classmethod
    def close(cls) -> None:
        while cls.made:
            cls.made.pop().close()

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Close the envs if the block fails, so that the next calls are made on new ones."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def both(self, call: str, *arguments: Any, **keywords: Any) -> Any:
        """Make a call on both; return the result."""
        with self.compared():
            expected = _outcome(self.oracle, call, *arguments, **keywords)
            found = _outcome(self.one, call, *arguments, **keywords)
            assert_same(expected, found, f"{call}{arguments}{keywords} ")
            assert_same(self.oracle.done, self.one.done, "done")
        return found

    def chosen(self, env_ids: list[int] | None) -> set[int]:
        return self.unpaused if env_ids is None else set(env_ids)

    @rule(env_ids=some, seed=seeds)
    def reset(self, env_ids: Any, seed: Any) -> None:
        self.both("reset", env_ids, seed=seed)
        self.in_flight -= self.chosen(env_ids)

    @rule(env_ids=some, seed=seeds)
    def send_reset(self, env_ids: Any, seed: Any) -> None:
        self.both("send_reset", env_ids, seed=seed)
        self.in_flight |= self.chosen(env_ids)

    @rule(env_ids=some, action=action, align=st.sampled_from(["item", "batch"]))
    def step(self, env_ids: Any, action: list[int], align: str) -> None:
        self.both("step", np.array(action[: len(self.chosen(env_ids))]), env_ids, align=align)

    @rule(env_ids=env_ids, action=action)
    def send(self, env_ids: list[int], action: list[int]) -> None:
        if self.both("send", action[: len(env_ids)], env_ids) is None:  # it was not refused
            self.in_flight.update(env_ids)

    @precondition(lambda self: self.in_flight)
    @rule()
    def receive(self) -> None:
        with self.compared():
            expected, found = drain(self.oracle), drain(self.one, max_envs=2)
            assert found.keys() == self.in_flight
            assert_same(expected, found, "received ")
            assert_same(self.oracle.done, self.one.done, "done")
            assert_same(self.oracle.reset_infos, self.one.reset_infos, "reset_infos")
        self.in_flight.clear()

    @precondition(lambda self: not self.in_flight)
    @rule(env_ids=some, num_steps=st.integers(1, 9))
    def rollout(self, env_ids: Any, num_steps: int) -> None:
        self.both("rollout", act, num_steps, id=env_ids, progress=False)

    @precondition(lambda self: not self.in_flight)
    @rule(env_ids=some, num_episodes=st.integers(1, 7), seed=seeds)
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

    @rule(env_ids=some)
    def resume(self, env_ids: Any) -> None:
        self.both("resume", env_ids)
        self.unpaused.update(range(NUM_ENVS) if env_ids is None else env_ids)

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        """Make one of the `calls`."""
        name = data.draw(st.sampled_from([*self.calls]))
        self.both(name, *data.draw(self.calls[name]))

    calls: ClassVar[dict[str, st.SearchStrategy[Any]]] = {"seed": st.tuples(st.integers(0, 99))}


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

    def prepare(self, env: ParallelEnv) -> None:
        env.reset(seed=0)
        env.set_env_attr("box", None)
        env.set_env_attr("notes", values=[[]] * len(env))
        env.set_env_attr("length", values=LENGTHS)

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

    def prepare(self, env: Any) -> None:
        env.reset_all()
        env.reset(seed=0)

    @rule(env_ids=some, arguments=st.sampled_from([{}, {"length": 2}]))
    def next_task(self, env_ids: Any, arguments: dict[str, Any]) -> None:
        self.both("next_task", env_ids, **arguments)
        self.in_flight -= self.chosen(env_ids)

    @rule()
    def reset_all(self) -> None:
        self.both("reset_all")
        self.in_flight.clear()


def run(machine_type: type[Machine], make: Callable[[str], ParallelEnv], mode: str, number: int) -> None:
    kept = {"make": staticmethod(make), "mode": mode, "made": []}
    machine: Any = seed(number)(type("SeededMachine", (machine_type,), kept))  # each has its own sequences
    try:
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
    finally:
        machine.close()


in_other_modes = pytest.mark.parametrize("word", [word for word in registry.known_modes() if word != ORACLE])


@pytest.mark.parametrize("done_policy", DONE_POLICIES)
@in_other_modes
def test_any_sequence_of_calls_equals_the_oracle(word: str, done_policy: Any, request: pytest.FixtureRequest) -> None:
    mode = require_mode(word, request)
    row, column = registry.known_modes().index(word), DONE_POLICIES.index(done_policy)
    kind, num_cpus = (Toolbox, Spaceless)[(row + column) % 2], 2 + column // 2

    def make(word: str) -> ParallelEnv:
        return ParallelEnv(five_env_fns(kind), word, done_policy, num_cpus=num_cpus)

    run(ToolboxMachine, make, mode, row * len(DONE_POLICIES) + column)


@pytest.mark.parametrize("auto", [True, False])
@in_other_modes
def test_any_sequence_of_sampler_calls_equals_the_oracle(word: str, auto: bool, request: pytest.FixtureRequest) -> None:
    mode = require_mode(word, request)
    kind = "plain" if auto else "sheet"
    arguments = [{"total": total, "kind": kind} for total in (2, 6, 1, 4, 3)]

    def make(word: str) -> ParallelEnv:
        return ParallelEnv.from_samplers(Walks, arguments, word, auto, num_cpus=2)

    run(TaskMachine, make, mode, 100 + int(auto))
