"""Every fault that the library promises to handle, provoked in every mode: ``make faults``."""
