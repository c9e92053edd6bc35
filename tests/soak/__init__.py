"""A soak test: every mode is stepped while a seeded adversary disturbs it, and every transition is checked."""
