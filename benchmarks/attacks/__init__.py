"""What was attacked, as commands that print the figures of ``docs/reliability.md``."""
