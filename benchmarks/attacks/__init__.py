"""Attacks on the package, each a command that prints what holds: ``python -m benchmarks.attacks.<part>``."""
