"""One command per file; `lowtide.cli.app` has the table."""
