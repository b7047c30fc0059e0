"""The crash matrix: real processes, killed at named and at random instants, and what is left afterwards."""
