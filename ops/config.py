"""One YAML file per deployment, strict, with environment overrides.

Defaults come from the models that each folder keeps for its section, then the file, then variables named
``REDRAFT_<SECTION>__<KEY>``. Every value remembers where it came from.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from redraft.engine.config import EngineConfig
from redraft.feedback.config import FeedbackConfig
from redraft.feedback.drift.config import DriftConfig
from redraft.gateway.config import GatewayConfig
from redraft.ops.errors import UsageError
from redraft.retrain.gate.config import GateConfig
from redraft.retrain.loop_config import RetrainConfig
from redraft.retrain.plain_yaml import NumberDumper, NumberLoader
from redraft.retrain.traffic_config import TrafficConfig

ENV_PREFIX = "REDRAFT_"
ENVIRONMENT = {
    "REDRAFT_CONFIG": "The configuration file, where `--config` names none.",
    "REDRAFT_DEBUG": "Any value: an unexpected failure of a command shows its traceback.",
}
"""Variables that are not overrides of a configuration key."""

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


class ConfigError(UsageError):
    """The configuration cannot be used; the message names the file or variable, the key and what is allowed."""


class RedraftConfig(BaseModel):
    """A whole deployment; each folder owns its section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="The HTTP surface.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The embedded engine.")
    feedback: FeedbackConfig = Field(default_factory=FeedbackConfig, description="What is kept of the answers.")
    drift: DriftConfig = Field(default_factory=DriftConfig, description="When a change of accept length is a signal.")
    retrain: RetrainConfig = Field(default_factory=RetrainConfig, description="The loop that retrains drafters.")
    traffic: TrafficConfig = Field(default_factory=TrafficConfig, description="What of the traffic is learnt from.")
    gate: GateConfig = Field(default_factory=GateConfig, description="What a candidate must show to serve.")


@dataclass(frozen=True)
class Origin:
    """Where a value came from: ``place`` is for people, ``value`` is what was given."""

    place: str
    value: Any


@dataclass(frozen=True)
class LoadedConfig:
    """An effective configuration and, by dotted key, where each value that is not a default came from."""

    config: RedraftConfig
    origins: Mapping[str, Origin]
    path: Path | None


@dataclass(frozen=True)
class Key:
    """One setting as documented: its dotted name, what is allowed, its default and what it is for."""

    name: str
    allowed: str
    default: Any
    description: str


class _Loader(NumberLoader):
    """YAML without dates: a value that looks like one is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in NumberLoader.yaml_implicit_resolvers.items()
}


def load_config(path: Path | None, environ: Mapping[str, str]) -> LoadedConfig:
    """Read ``path`` (None: defaults only) and apply the overrides in ``environ``.

    Raises:
        ConfigError: the file, a key, a value or a variable is wrong.
    """
    if path is None and environ.get("REDRAFT_CONFIG"):
        path = Path(environ["REDRAFT_CONFIG"])
    origins = {**(_read_file(path) if path else {}), **_read_environment(environ)}
    sections: dict[str, dict[str, Any]] = {}
    for name, origin in origins.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = origin.value
    try:
        text = json.dumps(sections)
    except TypeError as error:
        raise ConfigError(f"{path or 'environment'}: only plain YAML values are allowed ({error})") from None
    try:
        config = RedraftConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        names = dict.fromkeys(".".join(str(part) for part in e["loc"][:2]) for e in error.errors())
        raise ConfigError("\n".join(_explain(name, origins[name]) for name in names)) from None
    return LoadedConfig(_with_absolute_paths(config, origins, path), origins, path)


def _with_absolute_paths(config: RedraftConfig, origins: Mapping[str, Origin], path: Path | None) -> RedraftConfig:
    """A path in the file is meant from the file's folder, so that it is one place wherever a command is typed."""
    sections: dict[str, BaseModel] = {}
    for name in RedraftConfig.model_fields:
        section: BaseModel = getattr(config, name)
        found = {}
        for key, value in section:
            if isinstance(value, Path):
                place = origins[f"{name}.{key}"].place
                folder = path.parent if path and place.startswith(f"{path}:") else Path()
                try:
                    found[key] = (folder / value.expanduser()).absolute()
                except RuntimeError:
                    raise ConfigError(f"{place}: {name}.{key} is {value}; there is no such user's home") from None
        sections[name] = section.model_copy(update=found)
    return config.model_copy(update=sections)


def keys() -> list[Key]:
    """Every setting, in the order of the models."""
    schema = RedraftConfig.model_json_schema()
    found = []
    for section, reference in schema["properties"].items():
        model = schema["$defs"][reference["$ref"].rsplit("/", 1)[-1]]
        for key, node in model["properties"].items():
            found.append(Key(f"{section}.{key}", _allowed(node), node.get("default"), node["description"]))
    return found


def render(loaded: LoadedConfig) -> str:
    """The effective YAML, each line with the origin of its value."""
    lines: list[tuple[str, str]] = []
    for section, values in loaded.config.model_dump(mode="json").items():
        lines.append((f"{section}:", ""))
        for key, value in values.items():
            origin = loaded.origins.get(f"{section}.{key}")
            lines.append((f"  {key}: {_inline(value)}", f"# {origin.place if origin else 'default'}"))
    width = max(len(setting) for setting, _ in lines)
    return "".join(f"{setting:<{width}}  {origin}".rstrip() + "\n" for setting, origin in lines)


def dump(config: RedraftConfig) -> str:
    """The effective YAML alone, as ``load_config`` reads it back."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=NumberDumper, sort_keys=False)


def reference() -> str:
    """Every setting and variable, as Markdown; ``ops/docs/configuration.md`` is this text."""
    lines = [
        "# Configuration",
        "",
        "Written by `redraft config reference`; the text comes from the code.",
        "",
        "One YAML file per deployment (`--config FILE`, else `$REDRAFT_CONFIG`, else the defaults alone). It is",
        "strict: an unknown key, a wrong type or a value out of range is an error that names the line, the key and",
        "what is allowed. A variable `REDRAFT_<SECTION>__<KEY>` overrides the file, for example",
        "`REDRAFT_GATEWAY__PORT=9000`; an unknown `REDRAFT_…` variable is an error too. A relative path in the file is",
        "meant from the file's folder, in a variable from the present one. `redraft config show` prints what is in",
        "force, and from where.",
    ]
    section = ""
    for key in keys():
        if section != (section := key.name.partition(".")[0]):
            lines += ["", f"## {section}", "", "| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
        name = key.name.partition(".")[2]
        lines.append(f"| `{name}` | `{_inline(key.default)}` | {key.allowed} | {key.description} |")
    lines += ["", "## Other variables", "", "| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    text = yaml.dump(value, Dumper=NumberDumper, width=10_000, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _read_file(path: Path) -> dict[str, Origin]:
    """Values by dotted key; the two levels of a deployment's YAML are walked as nodes, which know their lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        loader = _Loader(text)
        return dict(_settings(loader, loader.get_single_node(), path))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None


def _settings(loader: _Loader, root: yaml.Node | None, path: Path) -> Iterable[tuple[str, Origin]]:
    for section, section_key, section_node in _pairs(root, "", path):
        if section not in RedraftConfig.model_fields:
            raise _unknown(_place(path, section_key), "", section, RedraftConfig.model_fields)
        known = [key.name.removeprefix(f"{section}.") for key in keys() if key.name.startswith(f"{section}.")]
        for key, key_node, value_node in _pairs(section_node, section, path):
            if key in RedraftConfig.model_fields:
                raise ConfigError(f"{_place(path, key_node)}: {key} is a section; start its line without blanks")
            if key not in known:
                raise _unknown(_place(path, key_node), f"{section}.", key, known)
            yield f"{section}.{key}", Origin(_place(path, key_node), loader.construct_object(value_node, deep=True))


def _pairs(node: yaml.Node | None, name: str, path: Path) -> Iterable[tuple[str, yaml.Node, yaml.Node]]:
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        what = f"{name} must hold keys with values" if name else "must hold sections with keys (gateway:, engine:)"
        raise ConfigError(f"{_place(path, node)}: {what}, not {_kind(node)}")
    seen: dict[str, yaml.Node] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in seen:
            dotted = f"{name}.{key}" if name else key
            first = seen[key].start_mark.line + 1
            raise ConfigError(f"{_place(path, key_node)}: {dotted} is given twice (first in line {first})")
        seen[key] = key_node
        yield key, key_node, value_node


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"{node.value!r}"


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _read_environment(environ: Mapping[str, str]) -> dict[str, Origin]:
    variables = {ENV_PREFIX + key.name.replace(".", "__").upper(): key.name for key in keys()}
    found = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in ENVIRONMENT:
            continue
        if variable not in variables:
            names = [name.removeprefix(ENV_PREFIX) for name in (*variables, *ENVIRONMENT)]
            raise _unknown("environment", ENV_PREFIX, variable.removeprefix(ENV_PREFIX), names)
        try:
            value = yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
        except yaml.YAMLError:
            value = text
        found[variables[variable]] = Origin(variable, value)
    return found


def _unknown(place: str, prefix: str, name: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"known: {', '.join(prefix + n for n in names)}"
    return ConfigError(f"{place}: unknown key {prefix}{name}; {hint}")


def _explain(name: str, origin: Origin) -> str:
    allowed = next(key.allowed for key in keys() if key.name == name)
    return f"{origin.place}: {name} is {_inline(origin.value)}; allowed: {allowed}"


def _allowed(node: Mapping[str, Any]) -> str:
    """A JSON-schema node in words."""
    if "anyOf" in node:
        return " or ".join(_allowed(option) for option in node["anyOf"])
    if "enum" in node:
        return "one of " + ", ".join(node["enum"])
    if node["type"] in ("integer", "number"):
        word = "a whole number" if node["type"] == "integer" else "a number"
        bounds = [
            f"{sign} {node[bound]:g}" if node["type"] == "number" else f"{sign} {node[bound]}"
            for bound, sign in _BOUNDS.items()
            if bound in node
        ]
        return " ".join([word, " and ".join(bounds)]).strip()
    return {"string": "text", "boolean": "true or false", "null": "null"}[node["type"]]
