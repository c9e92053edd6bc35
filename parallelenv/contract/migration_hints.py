"""Hints for users of other libraries: names that these use, and their equivalents here. More: ``docs/coming-from.md``.

No name is rejected because it is listed here, since it may be the name of something of the user's own. The code that
rejects a name looks up a hint here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelenv.contract.error_text import near_attribute, show
from parallelenv.errors import AbsentAttributeError, ArgumentError

GIVE_SPACES = "give ParallelEnv spaces=(observation_space, action_space)"

_SPACES = "Give spaces=(observation_space, action_space) of one env."
_WRAPPERS = "Wrap each env where it is made: ParallelEnv([lambda: Wrapper(gymnasium.make(id))] * n)."
_MODE = "Give a mode: para_mode='dummy' (a loop) or 'subproc' (worker processes)."
_DETAILS = "Give its items to ParallelEnv themselves; to ParallelEnv.make() options of a mode as backend_options={...}."
_EPISODES = "Put the result of to_sb3() into a VecMonitor, or a RecordEpisodeStatistics around the ParallelEnv."
_TRIGGER = "Give step_trigger, a function of the number of steps: a film shows all envs, whose episodes end apart."
_TO_MAKE = "It belongs to each env: ParallelEnv.make(id, num_envs=n, ...) hands it on, or give env fns."

_MAKE_ARGUMENTS = {
    "observation_space": _SPACES,
    "action_space": _SPACES,
    "context": "Give start_method='spawn', to ParallelEnv.make() as backend_options={'start_method': 'spawn'}.",
    "start_method": "It is an option of para_mode='subproc'; ParallelEnv.make() takes it in backend_options={...}.",
    "num_workers": "Give num_cpus: so many workers, each with a share of the envs.",
    "num_threads": "Give num_cpus: so many workers, each with a share of the envs.",
    "autoreset": "Give asynchronous='restart': an env that ends begins its next episode in the same step.",
    "auto_reset": "Give asynchronous='restart': an env that ends begins its next episode in the same step.",
    "max_concurrency": "Give num_cpus: so many workers, each with a share of the envs.",
    "shared_memory": "Leave it out: workers use shared memory wherever the spaces allow it.",
    "daemon": "Leave it out: workers end with their caller, and may start processes all the same.",
    "autoreset_mode": "It is an argument of to_gymnasium(); without an adapter give asynchronous='restart'.",
    "observation_mode": "It is an argument of to_gymnasium().",
    "wait_num": "It is an argument of to_tianshou(); without an adapter use recv(min_envs=...).",
    "n_envs": "Here it is num_envs, an argument of ParallelEnv.make().",
    "env_kwargs": "Give its items to ParallelEnv.make() themselves: ParallelEnv.make(id, n, **env_kwargs).",
    "wrapper_class": _WRAPPERS,
    "wrapper_kwargs": _WRAPPERS,
    "wrappers": _WRAPPERS,
    "vec_env_cls": _MODE,
    "vectorization_mode": _MODE,
    "vec_env_kwargs": _DETAILS,
    "vector_kwargs": _DETAILS,
    "monitor_dir": _EPISODES,
    "monitor_kwargs": _EPISODES,
}
_ARGUMENTS = {
    **_MAKE_ARGUMENTS,
    "num_envs": "Give a list with so many items, or use ParallelEnv.make(id, num_envs=n).",
    "render_mode": _TO_MAKE,
    "max_episode_steps": _TO_MAKE,
    "episode_trigger": _TRIGGER,
    "record_video_trigger": _TRIGGER,
}
_MODES = {
    "sync": "Gymnasium's 'sync' is 'dummy' here.",
    "async": "Gymnasium's 'async' is 'subproc' here.",
    **dict.fromkeys(("DummyVecEnv", "SyncVectorEnv", "DummyVectorEnv"), "What it does is 'dummy' here."),
    **dict.fromkeys(("SubprocVecEnv", "AsyncVectorEnv", "SubprocVectorEnv"), "What it does is 'subproc' here."),
    "subproc+caller_steps": "Give para_mode='subproc', caller_steps=True.",
}
_POLICIES = {  # as Gymnasium writes them, or names of its enum; case is ignored
    "samestep": "Gymnasium's 'SameStep' is 'restart' here; to_gymnasium('SameStep') has its very form.",
    "nextstep": "Gymnasium's 'NextStep' is to_gymnasium('NextStep') here, whatever asynchronous is.",
    "disabled": "Gymnasium's 'Disabled' is 'continue' here; to_gymnasium('Disabled') has its very form.",
}

_CALL = "Here it is customized_method(name, {'argument': value}, id)."
_FREEZE = "What NormalizeStates and NormalizeRewards count stops by env.frozen = True, set on the outermost wrapper."
_MADE = "It is settled when a ParallelEnv is made. Make another one: ParallelEnv(envs, {0}=...)."
_NO_STATES = "It is an attribute of NormalizeStates, and there is none around this."
_NO_REWARDS = "It is an attribute of NormalizeRewards, and there is none around this."
_NO_NORMALIZER = "It is an attribute of NormalizeStates and NormalizeRewards, and there is neither around this."
# Settings that would otherwise be set without effect and without notice.
_SETTINGS = {
    "training": _FREEZE,
    "update_running_mean": _FREEZE,
    "norm_obs": "Leave out NormalizeStates for it.",
    "norm_reward": "Leave out NormalizeRewards for it.",
    "asynchronous": _MADE.format("asynchronous"),
    "para_mode": _MADE.format("para_mode"),
}
_ATTRIBUTES = {
    **_SETTINGS,
    "env_method": _CALL,
    "to_gym": "Here it is to_gymnasium().",
    "evaluate": "Try run_episodes(policy, num_episodes=n); customized_method('evaluate') calls the envs' own.",
    "sample_actions": "Here it is env.action_space.sample().",
    "get_attr": "Here it is get_env_attr(name, id).",
    "set_attr": "Here it is set_env_attr(name, value, id).",
    "has_attr": "get_env_attr(name, default=...) answers the default for envs that do not have it.",
    "set_options": "Give them to reset(options=...).",
    "env_num": "Here it is num_envs.",
    "is_closed": "Here it is closed.",
    "num_unpaused_tasks": "Here it is num_unpaused.",
    "pause_at": "Here it is pause(id).",
    "resume_all": "Here it is resume().",
    "reset_single_env": "Here it is reset(id).",
    "step_at": "Here it is step([action], id, align='batch').",
    "async_step": "Here it is step_async(actions).",
    "wait_step": "Here it is step_wait(align='batch').",
    "call_at": "Here it is call(name, [arguments], id).",
    "attr_at": "Here it is attr(name, id).",
    "command_at": "Here it is command(name, data, id).",
    "next_task_at": "Here it is next_task(id), of what ParallelEnv.from_samplers() returns.",
    "is_async": "Collectors of Tianshou take what to_tianshou() returns.",
    "obs_rms": "Here it is state_statistics, of NormalizeStates; its mean and variance are those of .leaves[''].",
    "return_rms": "Here it is reward_statistics, of NormalizeRewards; its variance is that of .leaves[''].",
    "ret_rms": "Here it is reward_statistics, of NormalizeRewards; its variance is that of .leaves[''].",
    "frozen": _NO_NORMALIZER,
    "statistics": _NO_NORMALIZER,
    "state_statistics": _NO_STATES,
    "normalizer": _NO_STATES,
    "reward_statistics": _NO_REWARDS,
}


def of_argument(name: str) -> str:
    """Return the equivalent of a keyword argument: a sentence after a space, or an empty string."""
    return _sentence(_ARGUMENTS, name)


def of_make_argument(name: str) -> str:
    """Return the equivalent of a keyword argument of ``make_vec_env`` or ``make_vec``, as `of_argument` does."""
    return _sentence(_MAKE_ARGUMENTS, name)


def of_mode(word: Any) -> str:
    """Return the equivalent of a ``para_mode``: a sentence after a space, or an empty string."""
    return _sentence(_MODES, str(word))


def of_policy(word: Any) -> str:
    """Return the equivalent of an ``asynchronous``: a sentence after a space, or an empty string."""
    plain = str(getattr(word, "value", word)).replace("_", "").replace("-", "")
    return _sentence(_POLICIES, plain.lower())


def refuse_arguments(call: str, arguments: Mapping[str, Any]) -> None:
    """Raise if keyword arguments are given that a call does not have.

    Raises:
        ArgumentError: If there are any.
    """
    for name, value in arguments.items():
        raise ArgumentError(f"{name}={show(value)} is no argument of {call}.{of_argument(name)}")


def absent(owner: object, name: str) -> AbsentAttributeError:
    """Return the error for a name that does not exist, with its equivalent."""
    way_out = _ATTRIBUTES.get(
        name, f"If the envs have it: customized_method({name!r}) calls theirs, get_env_attr({name!r}) returns it."
    )
    return _absent(owner, name, f"{type(owner).__name__} has no attribute {name!r}.", way_out)


def not_to_set(owner: object, name: str, is_argument: bool) -> AbsentAttributeError:
    """Return the error for a name that cannot be set. ``is_argument``: whether the owner's constructor takes it."""
    default = f"If the envs have it, set_env_attr({name!r}, value) sets theirs."
    way_out = _ATTRIBUTES.get(name, _MADE.format(name) if is_argument else default)
    return _absent(owner, name, f"{type(owner).__name__} has no attribute {name!r} to set.", way_out)


def _absent(owner: object, name: str, fault: str, way_out: str) -> AbsentAttributeError:
    hint = "" if name in _ATTRIBUTES else near_attribute(name, type(owner))
    return AbsentAttributeError(f"{fault}{hint} {way_out}", name=name)  # with `obj` Python 3.12 adds a hint, too


def is_setting(name: str) -> bool:
    """Whether other libraries' wrappers have this as a setting."""
    return name in _SETTINGS


def _sentence(words: Mapping[str, str], word: str) -> str:
    return f" {words[word]}" if word in words else ""
