"""Bring an LLM RL post-training run up on Slurm, and say why it does not work."""

__version__ = "0.2.0"
