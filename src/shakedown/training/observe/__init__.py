"""What a run shows of itself: where time goes, memory, progress lines, logs, live status."""
