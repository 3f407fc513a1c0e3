"""The benchmark of secure sums: what is sent, by hand, and how it grows."""

from studies.benchmarks.secure_sums import measure, table


def test_a_round_has_four_messages_and_bytes_that_grow_with_the_neighbours_alone():
    few, more = measure(4, 10_000), measure(12, 10_000)
    assert (few.neighbours, few.threshold) == (3, 2)
    assert (few.messages, few.plain) == (4, 40_128)  # a header of 128 bytes
    masked = 4 * (10_000 + 3) + 128
    # Of each neighbour a sealed share of 400 bytes at most, a share of 68 and its number, thrice, of 8 bytes.
    assert masked < few.up < masked + 3 * 600 + 500
    assert few.up - masked < more.up - masked < (more.neighbours / 3 + 1) * (few.up - masked)
    assert few.plain < few.down < few.plain + 3 * 700 + 500
    assert min(few.client, few.all_stay, few.third_goes) > 0
    assert len(table([few, more]).splitlines()) == 4
