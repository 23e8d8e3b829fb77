"""The commands of the command line, one module per family; `p2pnode.cli` puts them together."""
