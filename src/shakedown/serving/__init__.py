"""Persistent inference servers: engines, lease, keeper, client."""
