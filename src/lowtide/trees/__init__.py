"""Directory trees that hostile code may have written: no link in them is ever followed."""
