"""vLLM as a rollout engine: a server of its own Python, weights pushed at every step.

engine.py     the engine: pushes weights, checks them, samples
server.py     one vLLM server: its process where it is ours, its HTTP routes
plugin/       what runs in vLLM's Python
"""
