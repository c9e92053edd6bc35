"""Actions with gradients, for learners that differentiate through their envs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv

from adapters.neighbours import require
from parallelenv.errors import ActionError

in_this_process = pytest.mark.parametrize("mode", ["dummy", "thread"], indirect=True)
in_other_processes = pytest.mark.parametrize("mode", ["subproc"], indirect=True)
TRAVELS = r"requires grad.*copied to another process.*tensor\.detach\(\).*torch\.no_grad\(\).*para_mode='dummy'"


class Keeps:
    """Keeps its actions, and returns a state made of the action."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def reset(self) -> Any:
        return None

    def step(self, action: Any) -> Any:
        self.kept.append(action)
        return self.state(action), 0.0, False, {}

    def state(self, action: Any) -> Any:
        return None


class Learns(Keeps):
    def state(self, action: Any) -> Any:
        if isinstance(action, dict):
            action = action["net"]
        return action(require("torch").ones(2)) if callable(action) else 3 * action


class LearnsDeclared(Learns):
    def __init__(self) -> None:
        import gymnasium

        super().__init__()
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


# ---------------------------------------------------------------- without torch


class FakeTensor:
    shape, dtype = (2,), "float32"

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad


class FakeModule:
    def __init__(self, *parameters: FakeTensor) -> None:
        self.parameters = lambda: iter(parameters)


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch: Any = ModuleType("torch")
    torch.Tensor, torch.nn = FakeTensor, ModuleType("torch.nn")
    torch.nn.Module = FakeModule
    torch.is_grad_enabled = lambda: True
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


WITH_GRADIENT: dict[str, Callable[[], Any]] = {
    "tensor": lambda: FakeTensor(True),
    "module": lambda: FakeModule(FakeTensor(False), FakeTensor(True)),
    "in a dict": lambda: {"net": FakeTensor(True), "size": 3},
    "in a tuple": lambda: (1, [FakeTensor(True)]),
    "in an object array": lambda: np.array([None, FakeTensor(True)]),
}


@pytest.mark.parametrize("kind", WITH_GRADIENT)
@in_this_process
def test_action_with_gradients_is_passed_to_env_uncopied(fake_torch: Any, make_env: MakeEnv, kind: str) -> None:
    envs = [Keeps(), Keeps()]
    env = make_env(envs)
    env.reset()
    given = [WITH_GRADIENT[kind](), WITH_GRADIENT[kind]()]
    env.step(given)
    for one, (kept,) in zip(given, (each.kept for each in envs), strict=True):
        assert (kept is one) is (kind in ("tensor", "module"))  # its container is copied
        assert _inside(kept) is _inside(one)


def _inside(action: Any) -> Any:
    if isinstance(action, dict):
        return action["net"]
    if isinstance(action, (list, tuple, np.ndarray)):
        return _inside(action[-1])
    return action


@in_this_process
def test_action_without_gradients_is_copied(fake_torch: Any, make_env: MakeEnv) -> None:
    envs = [Keeps()]
    env = make_env(envs)
    env.reset()
    for plain in (FakeTensor(False), FakeModule(FakeTensor(False)), [1.0]):
        env.step([plain])
        assert envs[0].kept[-1] is not plain
    tensor = FakeTensor(True)
    env.customized_method("step", {"action": tensor})  # arguments of methods are copied
    assert envs[0].kept[-1] is not tensor
    fake_torch.is_grad_enabled = lambda: False
    env.step([tensor])
    assert envs[0].kept[-1] is not tensor


@pytest.mark.parametrize("kind", WITH_GRADIENT)
@in_other_processes
def test_action_with_gradients_is_refused_for_other_processes(fake_torch: Any, make_env: MakeEnv, kind: str) -> None:
    env = make_env([Keeps, Keeps], num_cpus=2)
    env.reset()
    for step in (env.step, env.send, env.step_async):
        with pytest.raises(ActionError, match=TRAVELS):
            step([0, WITH_GRADIENT[kind]()])
    assert env.get_env_attr("kept") == [[], []]


@in_other_processes
def test_action_with_gradients_is_refused_with_caller_steps(fake_torch: Any, make_env: MakeEnv) -> None:
    env = make_env([Keeps, Keeps], num_cpus=2, caller_steps=True)
    env.reset()
    with pytest.raises(ActionError, match=TRAVELS):
        env.step([FakeTensor(True)], id=1)


# ---------------------------------------------------------------- with torch

needs_torch = pytest.mark.neighbours


def _actions(kind: str, net: Any) -> Any:
    torch = require("torch")
    inputs = torch.arange(4.0).reshape(2, 2)
    actions: dict[str, Callable[[], Any]] = {
        "rows": lambda: net(inputs),
        "list": lambda: [net(one) for one in inputs],
        "modules": lambda: [net, net],
        "dicts": lambda: [{"net": net, "size": 1}] * 2,
    }
    return actions[kind]()


@needs_torch
@pytest.mark.parametrize("kind", ["rows", "list", "modules", "dicts"])
@pytest.mark.parametrize("env_class", [Learns, LearnsDeclared])
@in_this_process
def test_gradients_flow_back_from_states(make_env: MakeEnv, kind: str, env_class: Any) -> None:
    torch = require("torch")
    net = torch.nn.Linear(2, 2)
    env = make_env([env_class, env_class], num_cpus=2)
    env.reset()
    env.step(_actions(kind, net)).states.square().sum().backward()
    found = net.weight.grad.clone()
    net.zero_grad()
    by_hand = [env_class().step(one)[0] for one in _actions(kind, net)]
    torch.stack(by_hand).square().sum().backward()
    assert torch.equal(found, net.weight.grad)
    assert found.abs().sum() > 0


@needs_torch
@in_this_process
def test_env_may_modify_its_action_row_in_place(make_env: MakeEnv) -> None:
    torch = require("torch")

    class Doubles(Keeps):
        def state(self, action: Any) -> Any:
            return action.mul_(2)

    actions = torch.ones(2, 2, requires_grad=True) * 1
    env = make_env([Doubles, Doubles])
    env.reset()
    assert env.step(actions).states.tolist() == [[2, 2], [2, 2]]


@needs_torch
@in_other_processes
def test_detached_actions_are_sent_to_other_processes(make_env: MakeEnv) -> None:
    torch = require("torch")
    net = torch.nn.Linear(2, 2)
    env = make_env([Learns, LearnsDeclared], num_cpus=2)
    env.reset()
    for kind in ("rows", "list", "modules", "dicts"):
        with pytest.raises(ActionError, match=TRAVELS):
            env.step(_actions(kind, net))
        with torch.no_grad():
            states = env.step(_actions(kind, net)).states
        assert not states.requires_grad
    assert env.step(_actions("rows", net).detach()).states.shape == (2, 2)
