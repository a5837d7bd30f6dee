"""The rooms of the package, and the floors on which they stand."""

# From the ground up. A room may import from the floors below it and from nothing else.
FLOORS = (
    ("activity", "limits", "names", "types", "version"),
    ("episode", "inputs"),
    ("engine", "rewards"),
    ("envs", "language", "learner"),
    ("checkpoints", "sampling", "sync", "tiny"),
    ("replay",),
    ("diagnostics",),
    ("algorithm",),
    ("inspector", "memory", "nlac", "reporting"),
    ("ablations", "baselines"),
    ("algorithms",),
    ("",),  # the package's own page
    ("command",),
)
