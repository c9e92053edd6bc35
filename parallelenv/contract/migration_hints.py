"""Hints for users of other libraries: names that these use, and their equivalents here. More: ``docs/coming-from.md``.

No name is rejected because it is listed here: it may be one of the user's own. What rejects a name looks up a hint.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallelenv.contract.error_text import near_attribute, show
from parallelenv.errors import AbsentAttributeError, ArgumentError

GIVE_SPACES = "give ParallelEnv spaces=(observation_space, action_space)"

_MADE = "It is settled when a ParallelEnv is made. Make another one: ParallelEnv(envs, {0}=...)."
_OF_MAKE = ("num_envs", "render_mode", "max_episode_steps")
"""Foreign to `ParallelEnv`, but not to `ParallelEnv.make`; and attributes of envs."""
SETTINGS = ("training", "update_running_mean", "norm_obs", "norm_reward", "asynchronous", "para_mode")
"""Wrappers of other libraries can set these; here that would be without effect and without notice."""
_TABLE = {  # the hint: the words that it is for
    # arguments
    "Give spaces=(observation_space, action_space) of one env.": "observation_space action_space",
    "Give start_method='spawn', to ParallelEnv.make() as backend_options={'start_method': 'spawn'}.": "context",
    "It is an option of para_mode='subproc'; ParallelEnv.make() takes it in backend_options={...}.": "start_method",
    "Give num_cpus: so many workers, each with a share of the envs.": "num_workers num_threads max_concurrency",
    "Give asynchronous='restart': an env that ends begins its next episode in the same step.": "autoreset auto_reset",
    "Leave it out: workers use shared memory wherever the spaces allow it.": "shared_memory",
    "Leave it out: workers end with their caller, and may start processes all the same.": "daemon",
    "It is an argument of to_gymnasium(); without an adapter give asynchronous='restart'.": "autoreset_mode",
    "It is an argument of to_gymnasium().": "observation_mode",
    "It is an argument of to_tianshou(); without an adapter use recv(min_envs=...).": "wait_num",
    "Here it is num_envs, an argument of ParallelEnv.make().": "n_envs",
    "Give its items to ParallelEnv.make() themselves: ParallelEnv.make(id, n, **env_kwargs).": "env_kwargs",
    "Wrap each env where it is made: ParallelEnv([lambda: Wrapper(gymnasium.make(id))] * n).": (
        "wrapper_class wrapper_kwargs wrappers"
    ),
    "Give a mode: para_mode='dummy' (a loop) or 'subproc' (worker processes).": "vec_env_cls vectorization_mode",
    "Give its items to ParallelEnv themselves; to ParallelEnv.make() options of a mode as backend_options={...}.": (
        "vec_env_kwargs vector_kwargs"
    ),
    "Put the result of to_sb3() into a VecMonitor, or a RecordEpisodeStatistics around the ParallelEnv.": (
        "monitor_dir monitor_kwargs"
    ),
    "Give a list with so many items, or use ParallelEnv.make(id, num_envs=n).": "num_envs",
    "It belongs to each env: ParallelEnv.make(id, num_envs=n, ...) hands it on, or give env fns.": (
        "render_mode max_episode_steps"
    ),
    "Give step_trigger, a function of the number of steps: a film shows all envs, whose episodes end apart.": (
        "episode_trigger record_video_trigger"
    ),
    # words of para_mode and asynchronous
    "Gymnasium's 'sync' is 'dummy' here.": "sync",
    "Gymnasium's 'async' is 'subproc' here.": "async",
    "What it does is 'dummy' here.": "DummyVecEnv SyncVectorEnv DummyVectorEnv",
    "What it does is 'subproc' here.": "SubprocVecEnv AsyncVectorEnv SubprocVectorEnv",
    "Give para_mode='subproc', caller_steps=True.": "subproc+caller_steps",
    "Gymnasium's 'SameStep' is 'restart' here; to_gymnasium('SameStep') has its very form.": "SameStep SAME_STEP",
    "Gymnasium's 'NextStep' is to_gymnasium('NextStep') here, whatever asynchronous is.": "NextStep NEXT_STEP",
    "Gymnasium's 'Disabled' is 'continue' here; to_gymnasium('Disabled') has its very form.": "Disabled DISABLED",
    # attributes and methods
    "What NormalizeStates and NormalizeRewards count stops by env.frozen = True, set on the outermost wrapper.": (
        "training update_running_mean"
    ),
    "Leave out NormalizeStates for it.": "norm_obs",
    "Leave out NormalizeRewards for it.": "norm_reward",
    _MADE.format("asynchronous"): "asynchronous",
    _MADE.format("para_mode"): "para_mode",
    "Here it is customized_method(name, {'argument': value}, id).": "env_method",
    "Here it is to_gymnasium().": "to_gym",
    "Try run_episodes(policy, num_episodes=n); customized_method('evaluate') calls the envs' own.": "evaluate",
    "Here it is env.action_space.sample().": "sample_actions",
    "Here it is get_env_attr(name, id).": "get_attr",
    "Here it is set_env_attr(name, value, id).": "set_attr",
    "get_env_attr(name, default=...) answers the default for envs that do not have it.": "has_attr",
    "Give them to reset(options=...).": "set_options",
    "Here it is num_envs.": "env_num",
    "Here it is closed.": "is_closed",
    "Here it is num_unpaused.": "num_unpaused_tasks",
    "Here it is pause(id).": "pause_at",
    "Here it is resume().": "resume_all",
    "Here it is reset(id).": "reset_single_env",
    "Here it is step([action], id, align='batch').": "step_at",
    "Here it is step_async(actions).": "async_step",
    "Here it is step_wait(align='batch').": "wait_step",
    "Here it is call(name, [arguments], id).": "call_at",
    "Here it is attr(name, id).": "attr_at",
    "Here it is command(name, data, id).": "command_at",
    "Here it is next_task(id), of what ParallelEnv.from_samplers() returns.": "next_task_at",
    "Collectors of Tianshou take what to_tianshou() returns.": "is_async",
    "Here it is state_statistics, of NormalizeStates; its mean and variance are those of .leaves[''].": "obs_rms",
    "Here it is reward_statistics, of NormalizeRewards; its variance is that of .leaves[''].": "return_rms ret_rms",
    "It is an attribute of NormalizeStates and NormalizeRewards, and there is neither around this.": (
        "frozen statistics"
    ),
    "It is an attribute of NormalizeStates, and there is none around this.": "state_statistics normalizer",
    "It is an attribute of NormalizeRewards, and there is none around this.": "reward_statistics",
}
_HINTS = {word: hint for hint, words in _TABLE.items() for word in words.split()}


def hint_at(word: object) -> str:
    """Return the equivalent of a word: a sentence after a space, or an empty string."""
    hint = _HINTS.get(str(getattr(word, "value", word)))
    return f" {hint}" if hint else ""


def of_make_argument(name: str) -> str:
    """Return the equivalent of a keyword argument of ``make_vec_env`` or ``make_vec``, as `hint_at` does."""
    return "" if name in _OF_MAKE else hint_at(name)


def refuse_arguments(call: str, arguments: Mapping[str, object]) -> None:
    """Raise an `ArgumentError` for keyword arguments that a call does not have."""
    for name, value in arguments.items():
        raise ArgumentError(f"{name}={show(value)} is no argument of {call}.{hint_at(name)}")


def absent(owner: object, name: str, purpose: str = "", default: str = "") -> AbsentAttributeError:
    """Return the error for a name that does not exist, with its equivalent."""
    ways = f"If the envs have it: customized_method({name!r}) calls theirs, get_env_attr({name!r}) returns it."
    hint = of_make_argument(name) or f"{near_attribute(name, type(owner))} {default or ways}"
    message = f"{type(owner).__name__} has no attribute {name!r}{purpose}.{hint}"
    return AbsentAttributeError(message, name=name)  # with `obj` Python 3.12 adds a hint, too


def not_to_set(owner: object, name: str, is_argument: bool) -> AbsentAttributeError:
    """Return the error for a name that cannot be set. ``is_argument``: whether the owner's constructor takes it."""
    default = f"If the envs have it, set_env_attr({name!r}, value) sets theirs."
    return absent(owner, name, " to set", _MADE.format(name) if is_argument else default)
