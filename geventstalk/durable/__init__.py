"""Jobs as records of a journal: how they are written down, and when a change is safe to acknowledge."""
