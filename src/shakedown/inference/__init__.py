"""Persistent inference servers: engines, idle limit, daemon, client."""
