"""The dimension legend, and the error that a user is meant to read.

Shapes are named by one letter each, in docstrings, in jaxtyping annotations, and as suffixes of array names (`logits_BLV`):

    B batch rows     L sequence length    Q query rows        S cache slots      W window of ranks
    D width          H query heads        G key/value heads   K head width       F mlp width
    V vocabulary     N layers             P rotary tracks     T stop or banned ids of a request

Two orders of a sequence occur. *Sequence order*: column l is position l of the text. *Rank order*: column d is position order[d], the d-th
position to be revealed. A function says which one it wants; `order_BL` is always the map from rank to position.
"""


class UserError(Exception):
    """Bad input. Its text is one line that names the thing and the mend; programs print it and exit non-zero, without a traceback."""
