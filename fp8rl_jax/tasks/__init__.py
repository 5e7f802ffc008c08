"""Prompts and rewards. Nothing here imports JAX, because the reward workers import this package."""
