"""The `outrider` command: one file per subcommand."""
