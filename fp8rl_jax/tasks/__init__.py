"""Problems, rewards and environments.

dataset         problems as text, split into a training set and a held-out set
sources         where problems come from: generators, functions, files, environments, Python
conversation    prompts of several messages
rewards         from a completion to its scores; runs in the workers
environment     problems that answer back, turn by turn; runs in the workers
episodes        conversations with an environment, and what of their tokens is trained on
scores          the rewards of one batch, and what went wrong with them
sandbox         the processes that rewards run in, behind `sandbox.pool.RewardPool`
distributed     rewards in a run of several processes
python_objects  rewards, environments and problems that are given as Python objects
"""
