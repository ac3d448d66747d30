"""Profiles of a run's workers: asked for, launched on the node, captured and brought back."""
