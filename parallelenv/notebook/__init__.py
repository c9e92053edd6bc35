"""Notebook display: pictures and films of envs, profiles, and the display of a `ParallelEnv`."""

from parallelenv.notebook.profile import Recorder
from parallelenv.notebook.repr import mime_bundle
from parallelenv.notebook.show import play_envs, record_envs, show_envs
from parallelenv.notebook.tiles import picture_of

__all__ = ["Recorder", "mime_bundle", "picture_of", "play_envs", "record_envs", "show_envs"]
