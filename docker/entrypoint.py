"""Fill the secrets into the environment, then become the command.

Compose hands secrets over as files under /run/secrets; the settings read environment variables. `{valkey_password}` in
DATABASE_URL, REDIS_URL or CUKILN_BLOBS_URL is replaced by the content of the file of that name, quoted for a URL; the
file `cukiln_api_key` becomes CUKILN_API_KEY. So no secret stands in a compose file, an image, or `docker inspect`.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

SECRETS = Path("/run/secrets")
URLS = ("DATABASE_URL", "REDIS_URL", "CUKILN_BLOBS_URL")
API_KEY = "cukiln_api_key"


class SecretMissing(Exception):
    """A URL names a secret that was not handed over."""


def with_secrets(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment with secrets in place; raises `SecretMissing`."""

    def value(match: re.Match[str]) -> str:
        return quote(read_secret(folder / match.group(1)), safe="")

    filled = dict(environment)
    for name in URLS:
        if name in filled:
            filled[name] = re.sub(r"\{(\w+)\}", value, filled[name])
    if (folder / API_KEY).exists():
        filled["CUKILN_API_KEY"] = read_secret(folder / API_KEY)
    return filled


def read_secret(path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise SecretMissing(f"the secret {path.name} cannot be read: {path}: {error.strerror}") from error
    if not secret:
        raise SecretMissing(f"the secret {path.name} is empty: {path}")
    return secret


def main(command: list[str]) -> None:
    try:
        environment = with_secrets(os.environ, SECRETS)
    except SecretMissing as error:
        sys.exit(f"cukiln: {error}")
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
