"""Memory of a step that the next one finds again, rather than have the system clear it anew.

A step on images makes and drops tensors of some megabytes each. The C library's allocator gives such memory back to
the system at once, which must clear every page of it before the next step has it: a tenth of a step and more.
"""

import ctypes
from functools import cache

# glibc's numbers of what mallopt sets (malloc.h), and the bytes: what is smaller is taken from the heap, and so much
# free memory at a heap's end stays with the process.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 64 << 20
MOST_KEPT = 256 << 20


@cache
def keep_freed() -> bool:
    """Let this process keep freed memory, up to ``MOST_KEPT``; return False if its C library can't."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc: its allocator does as it does
        return False
    wanted = {_TRIM_THRESHOLD: MOST_KEPT, _TOP_PAD: LARGEST_KEPT, _MMAP_THRESHOLD: LARGEST_KEPT}
    done = [mallopt(number, size) for number, size in wanted.items()]
    return 0 not in done
