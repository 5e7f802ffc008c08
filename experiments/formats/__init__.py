"""One page of all number formats: what each costs in bits, and what in error, mismatch and loss."""
