"""The commands of the command line, one module per group; `p2pnode.cli` registers them."""
