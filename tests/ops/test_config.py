"""A deployment's YAML is strict, and every refusal says where, what was given and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.ops.config import ConfigError, RedraftConfig, dump, keys, load_config, render

pytestmark = pytest.mark.unit

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "redraft.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_nothing_given_is_the_models_defaults() -> None:
    assert load_config(None, {}).config == RedraftConfig()


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "gateway:\n  port: 9000\n  host: 0.0.0.0\n")
    loaded = load_config(path, {"REDRAFT_GATEWAY__PORT": "9001", "HOME": "/root"})
    assert (loaded.config.gateway.port, loaded.config.gateway.host) == (9001, "0.0.0.0")
    shown = {
        line.split("#")[0].strip(): line.split("#")[1].strip() for line in render(loaded).splitlines() if "#" in line
    }
    assert shown["port: 9001"] == "REDRAFT_GATEWAY__PORT"
    assert shown["host: 0.0.0.0"] == f"{path}:3"
    assert shown["block_size: 8"] == "default"


def test_a_variable_names_the_file_unless_the_command_does(tmp_path: Path) -> None:
    path = write(tmp_path, "gateway: {port: 9000}")
    assert load_config(None, {"REDRAFT_CONFIG": str(path)}).config.gateway.port == 9000
    assert load_config(QUICKSTART, {"REDRAFT_CONFIG": str(path)}).config.gateway.port == 8000


def test_what_is_dumped_is_what_is_loaded(tmp_path: Path) -> None:
    text = "gateway: {port: 0, session_idle_seconds: 0.5}\nengine: {socket: /tmp/x y.sock, model: '1e5'}"
    config = load_config(write(tmp_path, text), {}).config
    assert load_config(write(tmp_path, dump(config)), {}).config == config


@pytest.mark.parametrize("text", ["1e-1", "1E-1", "+1.e-1", ".01e+1", "1.0e-1", "0.1"])
def test_a_number_is_one_however_it_is_written(tmp_path: Path, text: str) -> None:
    by_file = load_config(write(tmp_path, f"drift: {{effect_floor: {text}}}"), {})
    by_variable = load_config(None, {"REDRAFT_DRIFT__EFFECT_FLOOR": text})
    assert by_file.config.drift.effect_floor == by_variable.config.drift.effect_floor == 0.1


def test_a_relative_path_is_meant_from_the_files_folder_and_in_a_variable_from_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = write(tmp_path, "retrain: {folder: drafters, recipe: ~/r.yaml}\nfeedback: {folder: /kept}")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in (path, Path("../redraft.yaml")):
        config = load_config(name, {"REDRAFT_ENGINE__SOCKET": "e.sock"}).config
        assert config.retrain.folder is not None
        assert config.retrain.folder.resolve() == tmp_path / "drafters"
        assert config.retrain.folder.is_absolute()
        assert config.retrain.recipe == Path("/home/somebody/r.yaml")
        assert config.feedback.folder == Path("/kept")
        assert config.engine.socket == tmp_path / "elsewhere" / "e.sock"
    with pytest.raises(ConfigError, match=r"RETRAIN__FOLDER: retrain.folder is ~nobody-here/x; there is no such"):
        load_config(path, {"REDRAFT_RETRAIN__FOLDER": "~nobody-here/x"})


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "gateway:\n", "gateway: {}\nengine:\n", "\ufeffengine: {block_size: 8}\n"]
)
def test_an_empty_file_or_section_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text), {}).config == RedraftConfig()


def test_a_value_that_looks_like_a_date_is_text(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "engine: {model: 2024-01-01}"), {}).config.engine.model == "2024-01-01"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gatway: {}", r":1: unknown key gatway; did you mean gateway\?"),
        ("gatway:\n  port: 3", r":1: unknown key gatway; did you mean gateway\?"),
        ("gateway:\n  port:\n    [1]", r":2: gateway.port is \[1\]; allowed: a whole number"),
        ("gateway:\n  prot: 3", r":2: unknown key gateway.prot; did you mean gateway.port\?"),
        ("gateway:\n  port: 1\n  engine:\n    model: a", r":3: engine is a section; start its line without blanks"),
        ("engine:\n  zzzz: 3", r":2: unknown key engine.zzzz; known: engine.model, "),
        ("gateway:\n  port: x", r":2: gateway.port is x; allowed: a whole number ≥ 0 and ≤ 65535"),
        ("gateway:\n  port: '80'", r"gateway.port is '80'; allowed: a whole number"),
        ("gateway:\n  port: true", r"gateway.port is true; allowed: a whole number"),
        ("gateway:\n  port: 65536", r"gateway.port is 65536; allowed: "),
        ("gateway:\n  host: 3", r"gateway.host is 3; allowed: text"),
        ("gateway:\n  session_idle_seconds: .nan", r"session_idle_seconds is .nan; allowed: a number > 0"),
        ("gateway:\n  session_idle_seconds: -1.5", r"session_idle_seconds is -1.5; allowed: a number > 0"),
        ("engine:\n  lossless: maybe", r"engine.lossless is maybe; allowed: one of auto, invariant, tolerant"),
        ("engine:\n  context_length: 3", r"context_length is 3; allowed: a whole number ≥ 16 or null"),
        ("engine:\n  model:", r"engine.model is null; allowed: text"),
        ("engine:\n  model: [a, b]", r"engine.model is \[a, b\]; allowed: text"),
        ("engine: {kv_bytes: 1.5}", r"engine.kv_bytes is 1.5; allowed: a whole number ≥ 1048576"),
        ("engine: {model: a}\nengine: {model: b}", r":2: engine is given twice \(first in line 1\)"),
        ("engine:\n  model: a\n  model: b", r":3: engine.model is given twice \(first in line 2\)"),
        ("- 1", r":1: must hold sections with keys"),
        ("hello", r":1: must hold sections with keys"),
        ("gateway: [1]", r":1: gateway must hold keys with values, not a list"),
        ("gateway: 8000", r":1: gateway must hold keys with values, not '8000'"),
        ("? [a]\n: 3", r"unknown key"),
        ("a: b: c", r":1: not valid YAML: mapping values"),
        ("gateway: {port: 1", r"not valid YAML"),
        ("gateway: *nobody", r"not valid YAML: found undefined alias"),
        ("engine: &a {model: [*a]}", r"not valid YAML: found unconstructable recursive node"),
        ("a: 1\n---\nb: 2", r":2: not valid YAML: but found another document"),
        ("engine: {model: !!python/name:os.system }", r"not valid YAML: could not determine a constructor"),
        ("engine: {model: !!binary aGk=}", r"only plain YAML values are allowed"),
        ("[" * 5000, r"not valid YAML"),
        ("engine: {kv_bytes: " + "9" * 5000 + "}", r"not valid YAML"),
        ("\x00", r"not valid YAML: unacceptable character"),
        (b"\xff\xfe", r"not UTF-8 text \(byte 0\)"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_reason(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, {})
    assert str(caught.value).startswith(str(path))


def test_every_wrong_value_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "gateway: {port: x, host: 3}\nengine: {block_size: 1}"), {})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("name", ["missing.yaml", ".", "redraft.yaml/below"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"no such configuration file|cannot be read"):
        load_config(tmp_path / name, {})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("REDRAFT_GATEWAY_PORT", "1", r"unknown key REDRAFT_GATEWAY_PORT; did you mean REDRAFT_GATEWAY__PORT\?"),
        ("REDRAFT_CONFG", "x", r"did you mean REDRAFT_CONFIG\?"),
        ("REDRAFT_GATEWAY__PORT", "abc", r"REDRAFT_GATEWAY__PORT: gateway.port is abc; allowed: a whole number"),
        ("REDRAFT_GATEWAY__PORT", "", r"gateway.port is null; allowed"),
        ("REDRAFT_ENGINE__MODEL", "[a]", r"REDRAFT_ENGINE__MODEL: engine.model is \[a\]; allowed: text"),
        ("REDRAFT_ENGINE__MODEL", "!!binary aGk=", r"only plain YAML"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {variable: value})


def test_a_variable_may_hold_what_is_no_yaml() -> None:
    assert load_config(None, {"REDRAFT_ENGINE__MODEL": "a: b: c"}).config.engine.model == "a: b: c"


def test_a_variable_can_unset_an_optional_value(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {context_length: 64}")
    assert load_config(path, {"REDRAFT_ENGINE__CONTEXT_LENGTH": "null"}).config.engine.context_length is None


def test_every_setting_is_described_and_its_default_is_allowed() -> None:
    assert all(key.description.endswith(".") and key.allowed for key in keys())
    assert [key.name.partition(".")[0] for key in keys()].count("gateway") == len(RedraftConfig().gateway.model_dump())


def test_the_quickstart_file_says_what_the_defaults_are() -> None:
    assert load_config(QUICKSTART, {}).config == RedraftConfig()
