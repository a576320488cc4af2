"""CUDA C++ kernels, compiled on the user's machine where there is a compiler; see docs/gpu.md."""
