"""Many steps at once: rollouts, evaluations, and policies that act for the envs that are ready."""
