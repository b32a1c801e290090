"""The worker: one process a die, which does what the daemon orders and decides nothing."""
