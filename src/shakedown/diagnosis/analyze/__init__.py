"""From facts to a diagnosis: see rules.py."""
