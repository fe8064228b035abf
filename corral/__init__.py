"""Corral: RL post-training for language models, and the machinery that proves a multi-node run."""

__version__ = "0.1.0"
