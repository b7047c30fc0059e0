"""The conformance suite, once per provider."""
