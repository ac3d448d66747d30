"""Persistent inference servers: engines, lease, daemon, client."""
