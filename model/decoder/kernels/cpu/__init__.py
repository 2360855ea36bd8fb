"""CPU kernels of our own: C++ compiled at set-up, called through ctypes; the torch reference is their oracle."""
