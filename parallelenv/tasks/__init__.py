"""Task samplers as envs: one episode is one task."""

from parallelenv.tasks.sampler_env import Task, TaskEnv, TaskSampler, TaskStep

__all__ = ["Task", "TaskEnv", "TaskSampler", "TaskStep"]
