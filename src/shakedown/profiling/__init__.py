"""Profiles of a run's workers: requested, launched on the node, captured and brought back."""
