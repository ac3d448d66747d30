"""What a stage will need and reach, before it runs: pure, from config and config.json alone."""
