"""Checks of the nodes of a run before it starts: `corral doctor`."""
