"""What Slurm says, and which of its words mean what: everybody else asks here."""
