"""CPU kernels of our own: C++ compiled at set-up, called through ctypes.

The torch reference is their oracle, and serves where they cannot be had.
"""
