"""Rows of conversation and answer, and the order in which a stage sees them."""

from shakedown.training.data.order import epoch_order, step_indices
from shakedown.training.data.rows import Row, load_rows

__all__ = ["Row", "epoch_order", "load_rows", "step_indices"]
