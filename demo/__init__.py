"""The bundled tiny model: its architecture, pictures, pixel rule and training."""
