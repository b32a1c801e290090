"""The CUDA kernels of ``kernels/*.cu``: compiled for the die, kept in the cache, launched on torch's stream.

``launch.launcher(device)`` gives what runs them, or None; the ops' modules take it as their first argument. No nvcc, no
extension builder, nothing at import: NVRTC and the driver through ctypes. See docs/kernels.md.
"""
