"""Parts of messages, hints for misspelt names and for names from other libraries, and plain-text tables."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice

from parallelenv.contract.interrupts import signal_behind

_MOST_IDS = 16
_LONGEST = 80
"""Maximum number of characters of a value that a message shows."""


class _Repr(reprlib.Repr):
    """Reads only as much of a value as a message can show, so a million items take no longer than 20 items."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 16
        self.maxstring = self.maxlong = self.maxother = 2 * _LONGEST

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """Keep the items in their order; `reprlib` would sort them."""
        if level <= 0 or not x:
            return "{...}" if x else "{}"
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return f"{{{', '.join(items)}{', ...' if len(x) > self.maxdict else ''}}}"

    def repr_instance(self, x: object, level: int) -> str:
        """Describe large arrays and tensors by shape and dtype."""
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not hasattr(type(x), "__array__") or shape is None or dtype is None:  # spaces have both, too
            return super().repr_instance(x, level)
        text = " ".join(repr(x).split()) if math.prod(shape) <= self.maxlist else ""
        return text if 0 < len(text) <= _LONGEST else f"<{type(x).__name__} of shape {tuple(shape)} and dtype {dtype}>"


_REPR = _Repr()


def show(value: object) -> str:
    """Return a value as text, much as a user would write it in code.

    This function raises no error of the value's own, even if its ``__repr__`` is broken.
    """
    try:
        text = _REPR.repr(value)
        if len(text) > _LONGEST and isinstance(value, (list, tuple, set, frozenset, dict)):
            return f"<{type(value).__name__} of {count(len(value), 'item')}>"
    except Exception as error:  # a broken __repr__, or an int of thousands of digits, must not hide the message
        if signal_behind(error) is not None:
            raise
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint, with a leading blank, that suggests the nearest known word; an empty string if none is near."""
    near = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def near_attribute(name: str, *owners: object) -> str:
    """Return a hint like that of `did_you_mean`, with the public attribute of ``owners`` nearest to a misspelt name."""
    names = {other for owner in owners for other in dir(owner) if not other.startswith("_") and other != name}
    # Objects have many names: with the usual cutoff of 0.6, `render` would match `render_mode`.
    return did_you_mean(name, names, cutoff=0.75)


def count(number: int, thing: str) -> str:
    """Return a number of things as text: ``1 env``, ``2 envs``, ``1,024 envs``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def name_range(env_ids: Sequence[int]) -> str:
    """Return consecutive ids as text: ``3``, ``0-7``."""
    return str(env_ids[0]) if len(env_ids) == 1 else f"{env_ids[0]}-{env_ids[-1]}"


def list_ids(env_ids: Sequence[int]) -> str:
    """Return ids as a list, shortened if it is long: ``[0, 1]``, ``[0, 1, 2, ..., 2999]``."""
    if len(env_ids) <= _MOST_IDS:
        return str(list(env_ids))
    return f"[{env_ids[0]}, {env_ids[1]}, {env_ids[2]}, ..., {env_ids[-1]}]"


def name_envs(env_ids: Sequence[int]) -> str:
    """Return ``"env 3"`` or ``"envs 3, 4"``."""
    return f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {list_ids(env_ids)[1:-1]}"


def were(number: int, thing: str) -> str:
    """Return a number of things and the matching verb: ``1 env was``, ``2 envs were``."""
    return f"{count(number, thing)} {'was' if number == 1 else 'were'}"


def number(value: float) -> str:
    """Return a number as text with three significant digits, or rounded to a whole number if it is 1,000 or more."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration as text, with a suitable unit and rounded as in `number`."""
    unit, size = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    return f"{number(seconds / size)} {unit}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Return rows under a header, aligned in columns; columns that are empty in every row are left out."""
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    padded = []
    for title, *cells in columns:
        width = max(map(len, (title, *cells)))
        padded.append([cell.ljust(width) if title in left else cell.rjust(width) for cell in (title, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


# ---------------------------------------------------------------- hints for users of other libraries
# See ``docs/coming-from.md`` for more names. A name is never rejected only because it is listed here: it may be one of
# the user's own names. Code that rejects a name for a different reason looks up a hint here.

GIVE_SPACES = "give ParallelEnv spaces=(observation_space, action_space)"

SET_ONCE = "It is fixed when a ParallelEnv is made. Make another one: ParallelEnv(envs, {0}=...)."
_OF_MAKE = ("num_envs", "render_mode", "max_episode_steps")
"""Names that `ParallelEnv.make` accepts as arguments, but `ParallelEnv` does not."""
FOREIGN_SETTINGS = ("training", "update_running_mean", "norm_obs", "norm_reward", "asynchronous", "para_mode")
"""Attributes that can be set on wrappers of other libraries; on this package's wrappers, they would have no effect."""
_TABLE = {  # hint: the words for which it is shown
    # arguments
    "Give spaces=(observation_space, action_space) of one env.": "observation_space action_space",
    "Give start_method='spawn', to ParallelEnv.make() as backend_options={'start_method': 'spawn'}.": "context",
    "It is an option of para_mode='subproc'; ParallelEnv.make() takes it in backend_options={...}.": "start_method",
    "Give num_cpus: the number of workers, each with a share of the envs.": "num_workers num_threads max_concurrency",
    "Give asynchronous='restart': an env that ends starts its next episode in the same step.": "autoreset auto_reset",
    "Leave it out: workers use shared memory wherever the spaces allow it.": "shared_memory",
    "Leave it out: workers exit with their caller, and can start processes anyway.": "daemon",
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
    "Give a list with that many items, or use ParallelEnv.make(id, num_envs=n).": "num_envs",
    "It belongs to each env: ParallelEnv.make(id, num_envs=n, ...) passes it on, or give env fns.": (
        "render_mode max_episode_steps"
    ),
    "Give step_trigger, a function of the number of steps: a video shows all envs, not one episode.": (
        "episode_trigger record_video_trigger"
    ),
    # words of para_mode and asynchronous
    "Gymnasium's 'sync' is 'dummy' here.": "sync",
    "Gymnasium's 'async' is 'subproc' here.": "async",
    "The equivalent here is 'dummy'.": "DummyVecEnv SyncVectorEnv DummyVectorEnv",
    "The equivalent here is 'subproc'.": "SubprocVecEnv AsyncVectorEnv SubprocVectorEnv",
    "Give para_mode='subproc', caller_steps=True.": "subproc+caller_steps",
    "Gymnasium's 'SameStep' is 'restart' here; to_gymnasium('SameStep') keeps its format.": "SameStep SAME_STEP",
    "Gymnasium's 'NextStep' is to_gymnasium('NextStep') here, whatever asynchronous is.": "NextStep NEXT_STEP",
    "Gymnasium's 'Disabled' is 'continue' here; to_gymnasium('Disabled') keeps its format.": "Disabled DISABLED",
    # attributes and methods
    "Set env.frozen = True on the outermost wrapper to stop the statistics of NormalizeStates and NormalizeRewards.": (
        "training update_running_mean"
    ),
    "Leave out NormalizeStates instead.": "norm_obs",
    "Leave out NormalizeRewards instead.": "norm_reward",
    SET_ONCE.format("asynchronous"): "asynchronous",
    SET_ONCE.format("para_mode"): "para_mode",
    "Here it is customized_method(name, {'argument': value}, id).": "env_method",
    "Here it is to_gymnasium().": "to_gym",
    "Try run_episodes(policy, num_episodes=n); customized_method('evaluate') calls the envs' own method.": "evaluate",
    "Here it is env.action_space.sample().": "sample_actions",
    "Here it is get_env_attr(name, id).": "get_attr",
    "Here it is set_env_attr(name, value, id).": "set_attr",
    "get_env_attr(name, default=...) returns the default for envs that do not have it.": "has_attr",
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
    "Here it is next_task(id), a method of the result of ParallelEnv.from_samplers().": "next_task_at",
    "Tianshou's collectors take the result of to_tianshou().": "is_async",
    "Here it is state_statistics, of NormalizeStates; .leaves[''] has its mean and variance.": "obs_rms",
    "Here it is reward_statistics, of NormalizeRewards; .leaves[''] has its variance.": "return_rms ret_rms",
    "It is an attribute of NormalizeStates and NormalizeRewards; this has neither wrapper.": ("frozen statistics"),
    "It is an attribute of NormalizeStates; this does not have that wrapper.": "state_statistics normalizer",
    "It is an attribute of NormalizeRewards; this does not have that wrapper.": "reward_statistics",
}
_HINTS = {word: hint for hint, words in _TABLE.items() for word in words.split()}


def hint_at(word: object) -> str:
    """Return a hint, with a leading blank, if ``word`` is known from another library; otherwise an empty string."""
    hint = _HINTS.get(str(getattr(word, "value", word)))
    return f" {hint}" if hint else ""


def hint_at_make_argument(name: str) -> str:
    """Return the result of `hint_at`, or an empty string if `ParallelEnv.make` accepts an argument with this name."""
    return "" if name in _OF_MAKE else hint_at(name)
