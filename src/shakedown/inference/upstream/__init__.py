"""How an inference server is called: connections, retries, neutral sampling, what it serves."""
