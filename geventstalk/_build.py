"""Which build this is: `compiled` when this module, and with it the core, was compiled by mypyc, else `pure`.

It must not import anything of ours, because `-v` asks it; setup.py says which modules are compiled together with it.
"""

from typing import Final

BUILD: Final = "compiled" if __file__.endswith(".so") else "pure"
