"""Monitoring of a running job: heartbeats, the watch over them, dumps on a signal, collection."""
