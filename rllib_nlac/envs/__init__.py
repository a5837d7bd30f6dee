"""Environments of text. Importing this package registers its own, so that they are known by name."""

from rllib_nlac.envs.builtin import register_all

register_all()
