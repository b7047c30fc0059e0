"""Tests of the emulators, with the providers' own unmodified SDKs."""
