"""Does it move: signs in; moves, waits or still out. Pure: the caller supplies signs and clock."""
