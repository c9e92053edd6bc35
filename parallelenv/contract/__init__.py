"""Plain data and rules that the caller, the workers and the backends share.

Apart from each other, the modules here import only `parallelenv.errors` and the version of the package.
"""
