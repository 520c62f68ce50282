"""Dataset folder layouts (kohya, EveryDream2, LunNova): one file per layout."""
