"""Data of the simulator: kernels.npz, see NOTICE."""
