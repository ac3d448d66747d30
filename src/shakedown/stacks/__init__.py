"""The frames of a stack, and the owner of their code."""
