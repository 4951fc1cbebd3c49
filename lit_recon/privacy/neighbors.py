"""Which data sets count as neighbors, the word on which every privacy statement depends.

`add_or_remove_one`: one has a record that the other lacks; sums of vectors clipped to norm `C` differ by at most `C`.
`replace_one`: both have `n` records, one of them different; the sums differ by at most `2 C`, so that twice the noise
is needed for the same epsilon. This is the relation of Balle et al. 2022.
"""

from __future__ import annotations

from typing import Literal

Neighbors = Literal["add_or_remove_one", "replace_one"]


def clip_norms_apart(neighbors: Neighbors) -> float:
    """How far neighbors' sums of clipped vectors can lie apart, in clipping norms.

    >>> clip_norms_apart("add_or_remove_one"), clip_norms_apart("replace_one")
    (1.0, 2.0)
    """
    return 1.0 if neighbors == "add_or_remove_one" else 2.0
