"""Checkpoints: from files to a filled decoder, with books kept. The rest of the house imports these names."""

from model.checkpoint.loading import Loaded, load, read_spec
from model.checkpoint.naming import Books
from model.checkpoint.opening import Opened, open_checkpoint
from model.gguf_file import CheckpointError

__all__ = ["Books", "CheckpointError", "Loaded", "Opened", "load", "open_checkpoint", "read_spec"]
