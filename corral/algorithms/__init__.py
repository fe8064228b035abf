"""Pure tensor maths of the algorithm: advantages, losses, KL and aggregation, on ragged token vectors.

Legend: S samples, R response tokens of all samples together, offsets [S+1] as in `corral.batch`, mask [R] bool, n any
slice of the R tokens. Nothing here reads configuration or touches distributed state, and nothing outside a mask leaks
into a value or a gradient: masked entries are replaced before the first arithmetic operation, because NaN × 0 is NaN.
"""
