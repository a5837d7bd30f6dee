"""Attacks on the package; each module prints the figures of one part of docs/reliability.md."""
