"""A store that speaks the protocol of S3 over HTTP, for tests and tools."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def running() -> Iterator[Mapping[str, str]]:
    """A server in a thread of this process; the environment in which S3's clients find it."""
    from moto.server import ThreadedMotoServer

    # It prints every request, and its own failures, which clients get as answers.
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield environment(f"http://{host}:{port}")
    finally:
        server.stop()


def environment(endpoint: str) -> Mapping[str, str]:
    """The variables that S3's clients read."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        # No file of this machine's user, and no server of its cloud.
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket(name: str) -> str:
    """The URL of a new bucket, where the environment says."""
    import fsspec

    fsspec.filesystem("s3", use_listings_cache=False).mkdir(name)
    return f"s3://{name}"
