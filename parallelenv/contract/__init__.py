"""Plain data and rules that the caller, the workers and the backends share.

From the rest of the package, the modules here import only `parallelenv.errors`, and the package's version and file.
"""
