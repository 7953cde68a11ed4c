"""The command line. Nobody imports it."""
