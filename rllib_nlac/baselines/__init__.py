"""Baselines on the same environments, engines and models: RLlib's own algorithms, and each other one in a short file."""
