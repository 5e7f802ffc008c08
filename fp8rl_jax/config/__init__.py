"""Every setting of the library as frozen dataclasses. Standard library only: a wrong key is
reported before JAX starts."""
