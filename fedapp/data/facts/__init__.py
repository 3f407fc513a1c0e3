"""What is known of data: what a look at them tells, what made them, and how a run prepares them."""
