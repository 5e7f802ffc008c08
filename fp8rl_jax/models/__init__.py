"""The transformer: its shape and weights, and one forward function for trainer and rollout."""
