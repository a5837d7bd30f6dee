"""What a trial needs of memory, and whether it fits: estimated from a configuration, before anything is loaded."""
