"""A step on one rank: the engine, its stages, what they measure."""
