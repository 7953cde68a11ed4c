"""Stage reward: `Rollout` -> `Score`."""
