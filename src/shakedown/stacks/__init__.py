"""What a frame of a stack is: whose code it belongs to."""
