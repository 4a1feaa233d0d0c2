"""What the command line runs: one file for each thing a command does."""
