"""Other people's interfaces: torch's pipelining and checkpoints."""
