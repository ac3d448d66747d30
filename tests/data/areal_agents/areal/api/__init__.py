"""Stands in for AReaL's own `areal.api`, which imports its whole training stack."""

from areal.api.reward_api import AsyncRewardWrapper

__all__ = ["AsyncRewardWrapper"]
