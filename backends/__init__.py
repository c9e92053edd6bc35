"""The backends of the modes. Files whose names start with an underscore contain code that backends use.

A backend only transports commands; `parallelenv.worker.host` executes them.
"""
