"""What a step of reinforcement learning costs on hardware that is not at hand. Never imports torch."""
