"""`shakedown agent run`: an agent alone, many at once, in groups, under the rollout controller."""
