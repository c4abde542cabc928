"""YAML in which every number is one: PyYAML keeps to YAML 1.1, to which ``1e-3`` is text for want of a point."""

from __future__ import annotations

import re

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
_FIRST = list("-+.0123456789")


class NumberLoader(yaml.SafeLoader):
    """Reads ``1e-3`` and ``1E5`` as numbers too."""


class NumberDumper(yaml.SafeDumper):
    """Quotes text that `NumberLoader` would read as a number."""


NumberLoader.add_implicit_resolver(_FLOAT, _EXPONENT, _FIRST)
NumberDumper.add_implicit_resolver(_FLOAT, _EXPONENT, _FIRST)
