"""Checkpoints of a stage: what is in them, how they are written, found and checked."""
