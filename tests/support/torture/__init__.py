"""The torturer: real journals and servers whose power is cut, whose disks fail, and whose files rot."""
