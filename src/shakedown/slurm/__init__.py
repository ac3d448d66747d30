"""All queries to Slurm, and the meaning of its answers."""
