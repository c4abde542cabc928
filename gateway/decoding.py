"""A request body's bytes to a checked message, or to an error that names the field to blame."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from redraft.engine.types import Capabilities
from redraft.gateway.errors import InvalidRequest
from redraft.gateway.parameters import Parameter, check_parameters

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<where>.*?)(?:\[\.\.\.\])*`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes one route's bodies; ``parameters`` says what becomes of each field, where ``type_`` does not say all."""

    def __init__(self, type_: type[T], parameters: Mapping[str, Parameter] | None = None) -> None:
        self.type = type_
        self.parameters = parameters
        self._decoder = msgspec.json.Decoder(type_)

    def decode(self, body: bytes, capabilities: Capabilities) -> T:
        """Pure and safe off the event loop; raises ApiError."""
        try:
            body.decode()
            if self.parameters is not None:
                check_parameters(_FIELDS.decode(body), self.parameters, capabilities)
            return self._decoder.decode(body)
        except UnicodeDecodeError as exc:
            raise InvalidRequest(f"The request body is not UTF-8 (at byte {exc.start}).", code="invalid_json") from exc
        except RecursionError as exc:
            raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from exc
        except msgspec.ValidationError as exc:
            raise _invalid(str(exc)) from exc
        except msgspec.DecodeError as exc:
            raise InvalidRequest(_not_json(body, str(exc)), code="invalid_json") from exc


def _invalid(detail: str) -> InvalidRequest:
    """A message and a field name out of msgspec's ``<what> - at `$.a[0].b```."""
    match = _AT.fullmatch(detail)
    assert match is not None
    what, where = match["what"], match["where"] or ""
    if field := _FIELD.fullmatch(what):
        param = ".".join(filter(None, (where, field["name"])))[:256]
        if field["problem"] == "missing required":
            return InvalidRequest(f"{param} is required.", param, "missing_required_parameter")
        return InvalidRequest(f"Unknown parameter {param!r}.", param, "unknown_parameter")
    what = f"{where or 'The request body'}: {what[0].lower()}{what[1:]}.".replace("`", "")
    return InvalidRequest(what, where or None, "invalid_type" if ", got" in what else "invalid_value")


def _not_json(body: bytes, detail: str) -> str:
    for name in (b"NaN", b"Infinity"):
        if name in body:
            return f"The request body is not JSON: {detail}. JSON has no {name.decode()}; send a number or null."
    if re.search(rb"\\u[dD][89a-fA-F]", body):
        return f"The request body is not JSON: {detail}. Surrogate escapes (\\ud800 to \\udfff) come in pairs."
    return f"The request body is not JSON: {detail}."
