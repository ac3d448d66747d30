"""A run's results, as one HTML page and as terminal text."""
