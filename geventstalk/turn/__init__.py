"""Turns: the steps of all ready clients, one commit, and the replies that wait for it."""
