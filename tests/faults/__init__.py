"""Every fault that the library promises to bear, really provoked in every mode: ``make faults``."""
