"""The code interpreter: an HTTP server inside the sandbox in front of real Jupyter kernels."""
