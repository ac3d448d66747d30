"""Hugging Face model folders: read, write, and the chat template."""
