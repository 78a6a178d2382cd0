"""The passes over a captured graph, in the order in which they run."""

if __name__ != "fxmem.passes":
    raise ImportError("this folder is the package fxmem.passes; import it under that name, with fxmem installed")
