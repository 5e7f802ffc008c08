"""What every operation is checked by, from its list of cases: the interpreter, the compiler, a
GPU."""
