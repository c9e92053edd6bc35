"""Tests of attributes, methods, and ownership of arguments and results."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

from parallelenv.errors import AbsentAttributeError, UnpicklableError
from parallelenv.testing.base import Contract, Make
from parallelenv.testing.envs import LARGE, Chain, Counter, Old, Sheet
from parallelenv.testing.odd_envs import OnlySome, Toolbox, Wrapped
from parallelenv.testing.scenario import KINDS, NUM_ENVS, AnswerRecord, assert_same, five_env_fns, items

ONES = [1] * NUM_ENVS


def _wrapped() -> list[Any]:
    return [partial(_wrap, number) for number in range(NUM_ENVS)]


def _wrap(number: int) -> Any:
    return Wrapped(Wrapped(Toolbox(number), "inner"), "outer")


def scribble(value: Any) -> None:
    """Overwrite every part of a result."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value.fill(value.dtype.type(1))
        return
    children = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple, np.ndarray)):
        for child in children:
            scribble(child)
    if isinstance(value, dict):
        value["scribble"] = True
    if isinstance(value, list):
        value.append("scribble")


class OwnershipContract(Contract):
    """Results belong to the caller, arguments are not changed, and envs keep their own data."""

    @pytest.mark.parametrize(("kind", "done_policy"), [("array", "restart"), ("dict", "idle"), ("mixed", "restart")])
    def test_writing_into_results_does_not_change_later_results(
        self, kind: str, done_policy: Any, make: Make, make_oracle: Make
    ) -> None:
        """Neither results of ``reset``, ``step`` nor ``done``."""
        records = []
        for env, writes in ((make(KINDS[kind](), done_policy), True), (make_oracle(KINDS[kind](), done_policy), False)):
            record = AnswerRecord()
            record.add("reset", env.reset(seed=3))
            action = [0.5 if space is None else _first_action(space) for space in env.action_spaces]
            for _ in range(8):
                answer = env.step(action)
                record.add("step", answer)
                if writes:
                    scribble(items(answer))
                record.add("done", env.done)
                if writes:
                    scribble([env.done])
            records.append(record)
        records[0].assert_equals(records[1])

    def test_writing_into_reset_infos_does_not_change_later_ones(self, make: Make, make_oracle: Make) -> None:
        """Both those that come with a step and those requested."""
        env, oracle = make(five_env_fns(Counter), "restart"), make_oracle(five_env_fns(Counter), "restart")
        for one in (env, oracle):
            one.reset(seed=1)
        scribble(env.reset_infos)
        assert_same(oracle.reset_infos, env.reset_infos)
        for _ in range(3):
            oracle.step(ONES)
            infos = env.step(ONES).infos
        scribble(infos[2])
        assert_same(oracle.reset_infos, env.reset_infos)

    def test_views_with_copy_false_equal_copies(self, make: Make, make_oracle: Make) -> None:
        """With ``copy=False`` states are read-only, and valid until the next call."""
        env, oracle = make(five_env_fns(Counter), "restart", copy=False), make_oracle(five_env_fns(Counter), "restart")
        states = env.reset(seed=1)
        assert not states.flags.writeable
        assert (states == oracle.reset(seed=1)).all()
        for _ in range(5):
            expected, found = oracle.step(ONES), env.step(ONES)
            assert_same(expected.states, found.states)
            assert_same(expected.infos, found.infos)

    def test_results_of_different_envs_share_no_objects(self, make: Make) -> None:
        """Even if the envs themselves share them."""
        env = make(five_env_fns(Toolbox), num_cpus=1)
        env.reset()
        infos = env.step(ONES).infos
        infos[0]["list"].append(3)
        infos[1]["array"][:] = 7
        assert [len(info["list"]) for info in infos] == [3, 2, 2, 2, 2]
        assert [info["array"].tolist() for info in infos[[0, 2]]] == [[0, 0]] * 2
        answers = env.customized_method("shared")
        answers[0]["list"].append(3)
        assert [len(answer["list"]) for answer in answers] == [3, 2, 2, 2, 2]

    def test_envs_do_not_modify_arguments_of_the_caller(self, make: Make) -> None:
        """Envs that write into arguments write into copies, one per env."""
        env = make(five_env_fns(Toolbox))
        options: dict[str, Any] = {"deep": [1]}
        one: dict[str, Any] = {"items": [0], "array": np.ones(3)}
        many = [copy.deepcopy(one) for _ in range(NUM_ENVS)]
        seeds, actions = [1, 2, 3, 4, 5], np.array(ONES)
        given = (options, one, many, seeds, actions)
        before = copy.deepcopy(given)
        env.reset(seed=seeds, options=options)
        env.step(actions)
        assert env.customized_method("spoil", one) == [2] * NUM_ENVS
        assert env.customized_method("spoil", many) == [2] * NUM_ENVS
        assert_same(before, given)

    def test_values_kept_by_envs_are_independent_of_the_caller(self, make: Make) -> None:
        """Even if the caller later changes arguments or results."""
        env = make(five_env_fns(Toolbox))
        value: list[Any] = [1]
        env.set_env_attr("box", values=[value] * NUM_ENVS)
        value.append(2)
        env.get_env_attr("box")[0].append(3)
        assert env.get_env_attr("box") == [[1]] * NUM_ENVS
        env.customized_method("spoil", {"items": value, "array": np.ones(1)}, [3, 1])
        value.append(4)
        assert env.get_env_attr("box") == [[1], [1, 2, 1], [1], [1, 2, 3], [1]]
        env.customized_method("own_notes")[2].append("mine")
        assert env.get_env_attr("notes") == [[]] * NUM_ENVS

    def test_action_kept_by_an_env_is_not_overwritten(self, make: Make) -> None:
        """It is not a view of the buffer of the next actions."""
        env = make(five_env_fns(Chain))
        env.reset()
        given = np.linspace(-1, 1, 3 * NUM_ENVS * 2, dtype=np.float32).reshape(3, NUM_ENVS, 2)
        for actions in given:
            env.step(actions.copy())
        for number, kept in enumerate(env.get_env_attr("kept")):
            assert_same(given[:, number], np.stack(kept))

    def test_earlier_results_are_not_overwritten(self, make: Make) -> None:
        """Even if envs reuse their buffers."""
        for kind in (Counter, Sheet, Old):
            env = make(five_env_fns(kind), "restart", num_cpus=1)
            record = AnswerRecord()
            record.add("reset", env.reset(seed=1))
            action = 0.5 if kind is Old else _first_action(env.action_spaces[0])
            for _ in range(8):
                record.add("step", env.step([action] * NUM_ENVS))
                record.add("attribute", env.get_env_attr("state"))
                record.add("reset_infos", env.reset_infos)
            record.check_unchanged()


def _first_action(space: Any) -> Any:
    space = copy.deepcopy(space)
    space.seed(1)
    return space.sample()


class CallContract(Contract):
    """Tests of attributes and methods."""

    def test_customized_method_passes_keyword_arguments(self, make: Make) -> None:
        """No arguments, one dict for all, or one dict per env."""
        env = make(five_env_fns(Toolbox))
        assert env.customized_method("name") == ["env0", "env1", "env2", "env3", "env4"]
        assert env.customized_method("name", {"prefix": "x"}, [4, 1]) == ["x4", "x1"]
        assert env.customized_method("name", [{"prefix": "x"}, {}], [4, 1]) == ["x4", "env1"]
        assert env.customized_method("part.double", {"by": 3}, slice(3, None)) == [9, 12]
        assert env.customized_method("nothing") == [None] * NUM_ENVS

    def test_return_values_are_in_order_of_id_not_of_completion(self, make: Make) -> None:
        """The first env in ``id`` is the last to finish."""
        env = make(five_env_fns(Toolbox))
        data = [{"sleep": 0.2}, {"sleep": 0.0}, {"sleep": 0.1}]
        assert env.customized_method("name", data, [4, 0, 2]) == ["env4", "env0", "env2"]
        assert env.get_env_attr("notes") == [["name"], [], ["name"], [], ["name"]]

    def test_large_return_values_arrive_complete(self, make: Make) -> None:
        """Returned arrays are writeable."""
        env = make(five_env_fns(Toolbox))
        for number, grown in enumerate(env.customized_method("grow", {"size": LARGE})):
            assert_same(np.full(LARGE, float(number)), grown)
            grown[0] = 1
        text = "x" * 300_000
        assert env.customized_method("name", {"prefix": text}, [4, 1]) == [f"{text}4", f"{text}1"]

    def test_missing_method_raises_and_leaves_all_envs_usable(self, make: Make) -> None:
        """The error names the method; envs that have it are called, and all envs remain usable."""
        env = make(five_env_fns(OnlySome))
        env.reset()
        with pytest.raises(AbsentAttributeError, match="'rare'") as caught:
            env.customized_method("rare")
        assert caught.value.partial == {1: 1, 3: 3}  # type: ignore[attr-defined]
        assert isinstance(caught.value, AttributeError)
        assert env.get_env_attr("calls") == [0, 1, 0, 1, 0]
        with pytest.raises(AbsentAttributeError, match="get_env_attr"):
            env.customized_method("number")
        assert env.step(ONES).states[:, 1].tolist() == ONES

    def test_get_env_attr_returns_default_for_absent_attribute(self, make: Make) -> None:
        """For envs without it; an existing attribute that is ``None`` is not absent."""
        env = make(five_env_fns(OnlySome))
        assert env.get_env_attr("extra") == [None, "extra1", None, "extra3", None]
        assert env.get_env_attr("extra", [3, 2], default="?") == ["extra3", "?"]
        assert env.get_env_attr("render_mode", default="?") == [None] * NUM_ENVS
        assert env.get_env_attr("number.real.no", default=0) == [0] * NUM_ENVS

    def test_attribute_names_are_resolved_through_wrappers(self, make: Make) -> None:
        """Names are read and set on the outermost wrapper that has them."""
        env = make(_wrapped())
        env.reset()
        env.step(ONES)
        assert env.get_env_attr("label") == ["outer"] * NUM_ENVS
        assert env.get_env_attr("env.label") == ["inner"] * NUM_ENVS
        assert env.get_env_attr("number") == [0, 1, 2, 3, 4]
        assert env.get_env_attr("part.level", [2]) == [20]
        assert env.customized_method("shout", id=[1]) == ["OUTER"]
        assert env.customized_method("name", id=[1]) == ["env1"]
        env.set_env_attr("label", "set")
        env.set_env_attr("length", 9)
        env.set_env_attr("unheard", "of")
        env.set_env_attr("part.level", 7, [2])
        names = ("label", "env.label", "unwrapped.length", "unwrapped.unheard", "part.level")
        assert [env.get_env_attr(name, 2)[0] for name in names] == ["set", "inner", 9, "of", 7]

    def test_set_env_attr_sets_attributes_of_selected_envs(self, make: Make) -> None:
        """One value for all, or one per env in order of ``id``."""
        env = make(five_env_fns(Toolbox))
        env.set_env_attr("box", {"a": 1})
        env.set_env_attr("box", None, [1])
        env.set_env_attr("box", values=["four", [2]], id=[4, 2])
        assert env.get_env_attr("box") == [{"a": 1}, None, [2], {"a": 1}, "four"]
        assert env.get_env_attr("box", [4, 1]) == ["four", None]

    def test_render_returns_one_frame_per_env(self, make: Make) -> None:
        """In order of ``id``, or tiled."""
        env = make(five_env_fns(Toolbox))
        env.reset()
        assert [frame[0, 0, 0] for frame in env.render([3, 1])] == [3, 1]
        assert env.render(tile=True).shape == (4, 6, 3)

    def test_uncopyable_argument_is_refused(self, make: Make) -> None:
        """Before anything is sent."""
        env = make(five_env_fns(Toolbox))
        env.set_env_attr("box", "old")
        stream = (item for item in range(1))
        with pytest.raises(UnpicklableError, match=r"env 1.*generator"):
            env.set_env_attr("box", values=["new", stream, "new", "new", "new"])
        with pytest.raises(UnpicklableError, match="env 3"):
            env.customized_method("name", [{}, {"prefix": stream}], [0, 3])
        assert env.get_env_attr("box") == ["old"] * NUM_ENVS
        assert env.get_env_attr("notes") == [[]] * NUM_ENVS

    def test_uncopyable_return_value_fails_only_for_its_env(self, make: Make) -> None:
        """``error.partial`` has the results of the others."""
        env = make(five_env_fns(Toolbox))
        with pytest.raises(UnpicklableError, match="generator") as caught:
            env.customized_method("uncopyable", {"only": 3})
        assert "env 3" in "".join(caught.value.__notes__)
        assert caught.value.partial == {0: 0, 1: 1, 2: 2, 4: 4}  # type: ignore[attr-defined]
        assert env.customized_method("uncopyable", {"only": 9}) == [0, 1, 2, 3, 4]
