"""A soak: every mode is stepped while a seeded adversary disturbs it, and every transition is accounted for."""
