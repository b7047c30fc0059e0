"""Providers: the seam (`base`), the table of names (`registry`), what is derived once (`derived`), one package each."""
