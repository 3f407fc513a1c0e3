"""How time passes in a run: the scheduler, task times, device profiles and availability."""
