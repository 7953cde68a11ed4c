"""Scripts behind the figures in docs."""
