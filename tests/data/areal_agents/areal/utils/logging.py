"""Stands in for AReaL's own `areal.utils.logging`, which colours lines by colorlog."""

from logging import getLogger

__all__ = ["getLogger"]
