"""Forecast of a stage's memory and speed before it runs: pure, from config and config.json."""
