"""One decoder for every family: specs, building blocks, kernels. Imports only itself and torch."""
