"""Rows of conversation and answer, and the order in which a stage sees them."""

from shakedown.training.data.order import epoch_order, step_indices
from shakedown.training.data.rows import Row, iter_rows, load_rows
from shakedown.training.data.stream import RowStream

__all__ = ["Row", "RowStream", "epoch_order", "iter_rows", "load_rows", "step_indices"]
