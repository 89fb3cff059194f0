"""What a test has measured in a child process."""

from collections.abc import Callable

import numpy as np


def taking(megabytes: int) -> Callable[[], int]:
    """Before it is measured this takes more than it does then, and gives it back."""
    np.ones(3 * megabytes * 125_000)
    return lambda: int(np.ones(megabytes * 125_000).size)
