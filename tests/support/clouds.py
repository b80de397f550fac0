"""Azure's and Google's storage as servers of this machine, behind one face for tests of both."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar

import pytest
from tests.support.google_front import TOKEN, GoogleFront
from tests.support.servers.azurite import ACCOUNT, EmbeddedAzurite, azurite_program
from tests.support.servers.s3 import EmbeddedS3, start_s3
from typing_extensions import override

from onceflow.testing import ServerError


class Cloud(ABC):
    """A running server, and how clients are told of it."""

    port: int
    """Where clients reach it."""
    secret: ClassVar[str]
    """The variable that holds the proof of who asks."""

    @abstractmethod
    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return the variables that lead clients there, or to another `port`, with all rights."""

    @abstractmethod
    def bucket(self, name: str) -> str:
        """Return the URL of a bucket that exists then."""

    @property
    @abstractmethod
    def server(self) -> EmbeddedAzurite | EmbeddedS3:
        """The process, to be killed and paused."""

    def close(self) -> None:
        """End the server."""
        self.server.stop()


class AzureCloud(Cloud):
    """Azurite. Skips the test where it cannot be had, unless ONCEFLOW_REQUIRE_AZURITE is set."""

    secret = "AZURE_STORAGE_ACCOUNT_KEY"

    def __init__(self) -> None:
        try:
            azurite_program()
        except ServerError as error:
            if os.environ.get("ONCEFLOW_REQUIRE_AZURITE"):
                raise
            pytest.skip(str(error))
        self._server = EmbeddedAzurite().start()
        self.port = self._server.port

    @property
    @override
    def server(self) -> EmbeddedAzurite:
        return self._server

    @override
    def environment(self, port: int | None = None) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{port or self.port}/{ACCOUNT}"
        return {**self._server.environment, "AZURE_STORAGE_ENDPOINT": endpoint}

    @override
    def bucket(self, name: str) -> str:
        return f"az://{self._server.create_container(name)}"


class GoogleCloud(Cloud):
    """Google's interface before the S3 server. Skips the test where that cannot be built."""

    secret = "GOOGLE_BEARER_TOKEN"

    def __init__(self) -> None:
        self._server = start_s3()
        self._front = GoogleFront(self._server)
        self.port = self._front.port

    @property
    @override
    def server(self) -> EmbeddedS3:
        return self._server

    @override
    def environment(self, port: int | None = None) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": TOKEN}

    @override
    def bucket(self, name: str) -> str:
        return f"gs://{self._server.create_bucket(name)}"

    @override
    def close(self) -> None:
        self._front.close()
        super().close()


def cloud_of(kind: str) -> Cloud:
    """Return the running cloud called `kind`."""
    return AzureCloud() if kind == "azure" else GoogleCloud()
