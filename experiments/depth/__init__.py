"""Mismatch by depth: what it is made of."""
