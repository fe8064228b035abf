"""The keys of a run, one module per section, each key beside its documentation."""
