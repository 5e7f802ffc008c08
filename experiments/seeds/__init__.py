"""Paired arms over several seeds: the runs behind every learning claim of the README."""
