"""Small programs in other languages that take real client libraries through a whole round."""
