"""What a command says when it cannot do its work."""

from __future__ import annotations


class CliError(Exception):
    """A failure told in one or two lines: what is wrong, where, and what to do."""

    exit_code = 1


class UsageError(CliError):
    """The command line or the configuration asks for something that does not exist."""

    exit_code = 2
