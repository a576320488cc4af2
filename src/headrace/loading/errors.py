"""The one error of loading: something about a checkpoint is wrong, and the message says what and where."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used; one line that names the file, the key or tensor, and the problem."""
