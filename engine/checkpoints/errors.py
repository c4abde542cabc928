"""What goes wrong with checkpoints, in words for the person who has to mend it."""


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message says which file or tensor, what was expected and what to do."""


class ModelNotFoundError(CheckpointError):
    """No model of that name is on this machine."""


class PullError(CheckpointError):
    """A model could not be fetched or written; nothing half-made was left."""


class AdapterError(CheckpointError):
    """An adapter cannot be merged: it is damaged, of another base, or of another kind."""
