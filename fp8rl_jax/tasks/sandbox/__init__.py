"""Rewards in processes that can be killed; `pool.RewardPool` is the door.

    pool            RewardPool, and the thread that gives samples to the workers
    worker_process  the trainer's handle on one worker
    worker          the worker's own process, and its supervisor
    answers         what a worker says, checked
    strict          what the strict sandbox takes from a worker: Landlock, capabilities, filters
    seccomp         filters of system calls: the gate for forks, calls that fail
    processes       Linux processes: adopted, counted, weighed, ended
    pickling        functions and classes as bytes for the workers

What the worker imports has no JAX, so nothing is imported here.
"""
