"""vLLM as a rollout engine: a server of its own Python, or vLLM in this process; weights pushed at
every step.

engine.py     the engine: pushes weights, checks them, samples
server.py     one vLLM server: its process where it is ours, its HTTP routes
nccl.py       weights to its GPUs
in_process.py vLLM without a server
plugin/       what runs in vLLM's Python
"""
