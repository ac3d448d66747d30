"""The inference side of GRPO: batches out, weights in, staleness kept."""
