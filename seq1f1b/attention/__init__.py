"""Functions that a model calls inside its modules: attention, positions, carried state, packed documents."""
