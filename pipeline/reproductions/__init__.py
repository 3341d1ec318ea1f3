"""Published tables and our numbers beside them, one table a module."""
