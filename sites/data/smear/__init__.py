"""Files of real blood cells: packed cells (npz) and Chula folders."""
