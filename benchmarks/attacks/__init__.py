"""Attacks on the package, as lists that tests and commands share."""
