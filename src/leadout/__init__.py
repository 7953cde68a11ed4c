"""GRPO post-training with rollouts by lossless speculative decoding."""

__version__ = "0.1.0"
