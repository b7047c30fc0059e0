"""The command line `lowtide`."""
