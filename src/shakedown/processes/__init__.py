"""Which process this is, what it does, and why it ended: what the kernel says, read once."""
