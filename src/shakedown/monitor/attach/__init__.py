"""Watching a job that shakedown did not start: samplers on its nodes, a judge, actions."""
