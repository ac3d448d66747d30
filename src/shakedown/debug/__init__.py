"""Debuggers for the processes of a run: where they stop, who may attach, and how to connect."""
