"""What secure sums take of Flower's ``secure_aggregation``, which has no public name: apart from ``internals``, as
few runs need it and it loads two libraries of cryptography, which Flower brings with it.
"""

from strategies.flower.internals import needed_for

with needed_for("secure sums"):
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
        decrypt,
        encrypt,
        generate_shared_key,
    )
    from flwr.common.secure_aggregation.secaggplus_utils import (
        share_keys_plaintext_concat,
        share_keys_plaintext_separate,
    )

__all__ = [
    "combine_shares",
    "create_shares",
    "decrypt",
    "encrypt",
    "generate_shared_key",
    "share_keys_plaintext_concat",
    "share_keys_plaintext_separate",
]
