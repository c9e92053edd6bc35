"""Actions with gradients, for learners that differentiate through their envs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import MakeEnv
from modes import IN_CALLER, PROCESSES, in_modes

from adapters.neighbours import require
from parallelenv.contract.spaces import object_array
from parallelenv.errors import ActionError

pytestmark = pytest.mark.neighbours
torch = require("torch")
in_this_process = in_modes(*IN_CALLER)
TRAVELS = r"requires grad.*copied to another process.*tensor\.detach\(\).*torch\.no_grad\(\).*para_mode='dummy'"


class Learns:
    """Keeps its actions, and returns a state made of the action."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def reset(self) -> Any:
        return None

    def step(self, action: Any) -> Any:
        self.kept.append(action)
        inner = innermost(action)
        return inner(torch.ones(2)) if callable(inner) else 3 * inner, 0.0, False, {}


class LearnsDeclared(Learns):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def innermost(action: Any) -> Any:
    """Return the tensor or module in an action."""
    if isinstance(action, dict):
        return action["net"]
    return innermost(action[-1]) if isinstance(action, (list, tuple, np.ndarray)) else action


KINDS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda net: net(torch.arange(4.0).reshape(2, 2)),
    "list": lambda net: [net(one) for one in torch.arange(4.0).reshape(2, 2)],
    "modules": lambda net: [net, net],
    "dicts": lambda net: [{"net": net, "size": 1}] * 2,
    "tuples": lambda net: [(1, [net])] * 2,
    "object arrays": lambda net: [object_array([None, net])] * 2,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_class", [Learns, LearnsDeclared])
@in_this_process
def test_gradients_flow_back_from_states(make_env: MakeEnv, kind: str, env_class: Any) -> None:
    net = torch.nn.Linear(2, 2)
    env = make_env([env_class, env_class], num_cpus=2)
    env.reset()
    env.step(KINDS[kind](net)).states.square().sum().backward()
    found = net.weight.grad.clone()
    net.zero_grad()
    by_hand = [env_class().step(one)[0] for one in KINDS[kind](net)]
    torch.stack(by_hand).square().sum().backward()
    assert torch.equal(found, net.weight.grad)
    assert found.abs().sum() > 0


@in_this_process
def test_only_actions_with_gradients_are_passed_uncopied(make_env: MakeEnv) -> None:
    env_object, net, tensor = Learns(), torch.nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    env = make_env([env_object])
    env.reset()
    for action in (tensor, net, {"net": net}):
        env.step([action])
        assert innermost(env_object.kept[-1]) is innermost(action)
    assert env_object.kept[-1] is not action, "its container is copied"
    for plain in (torch.ones(2), [torch.ones(2)]):
        env.step([plain])
        assert innermost(env_object.kept[-1]) is not innermost(plain)
    env.customized_method("step", {"action": tensor})  # arguments of methods are copied
    assert env_object.kept[-1] is not tensor
    with torch.no_grad():
        env.step([tensor])
    assert env_object.kept[-1] is not tensor
    rows = torch.ones(1, 2, requires_grad=True) * 1
    env.step(rows)
    assert env_object.kept[-1].mul_(2).tolist() == [2, 2], "an env may modify its row in place"


@pytest.mark.parametrize("options", [{}, {"caller_steps": True}], ids=["", "caller steps"])
@in_modes(PROCESSES)
def test_only_detached_actions_are_sent_to_other_processes(make_env: MakeEnv, options: Any) -> None:
    net = torch.nn.Linear(2, 2)
    env = make_env([Learns, LearnsDeclared], num_cpus=2, **options)
    env.reset()
    for make in KINDS.values():
        for step in (env.step, env.send, env.step_async):
            with pytest.raises(ActionError, match=TRAVELS):
                step(make(net))
    assert env.get_env_attr("kept") == [[], []]
    for kind in ("rows", "list", "modules", "dicts"):
        with torch.no_grad():
            assert not env.step(KINDS[kind](net)).states.requires_grad
    assert env.step(KINDS["rows"](net).detach()).states.shape == (2, 2)
