"""Triton kernels (Tillet et al. 2019) for NVIDIA GPUs; under TRITON_INTERPRET=1 they run on the CPU, for tests.

Imported only where a GPU is used: torch and Triton come with the `gpu` extra.
"""
