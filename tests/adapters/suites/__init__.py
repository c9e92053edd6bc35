"""The tests of other libraries, run with our adapters in the place of their vector envs."""
