"""The line by which a run tells how far it is: for people, and for what reads its log."""


def progress_line(
    aggregation: int, total: int, working: int, clients: int, seconds_left: float | None = None
) -> str:
    """Return ``progress: aggregation 12 of 100, 3 of 5 devices at work, 0:04:10 left``.

    The last part, hours:minutes:seconds, is there once it can be told. ``fedapp deploy status`` reads this line.
    """
    line = f"progress: aggregation {aggregation} of {total}, {working} of {clients} devices at work"
    if seconds_left is None:
        return line
    minutes, seconds = divmod(round(seconds_left), 60)
    return f"{line}, {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
