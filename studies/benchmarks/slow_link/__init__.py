"""Large models over slow links: a real SuperLink and two SuperNodes, each behind a link with a delay and a rate."""
