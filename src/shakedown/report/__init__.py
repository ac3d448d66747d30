"""Everything a run wrote, as one HTML page and as a view in the terminal."""
