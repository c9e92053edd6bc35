"""The Ray modes in clusters of several nodes."""
