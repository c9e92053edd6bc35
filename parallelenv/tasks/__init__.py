"""Samplers of tasks as envs: an episode is a task."""

from parallelenv.tasks.sampler_env import Task, TaskEnv, TaskSampler, TaskStep

__all__ = ["Task", "TaskEnv", "TaskSampler", "TaskStep"]
