"""The command line, `fp8rl COMMAND`. Nothing heavy is imported before a command's arguments are
known to be sound."""
