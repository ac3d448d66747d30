"""Processes: their identity, worker processes, and why one ended, as the kernel reports it."""
