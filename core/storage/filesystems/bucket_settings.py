"""The settings of a bucket: its url, obstore's options, credentials by reference, timeouts.

Credentials that are not in the options are looked up like the service's own tools do: S3 in
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), a web identity, the container's or
the machine's role; Google in GOOGLE_APPLICATION_CREDENTIALS or the machine's account; Azure in
AZURE_STORAGE_*, a workload identity or the machine's. The endpoint likewise: AWS_ENDPOINT_URL,
GOOGLE_BASE_URL, AZURE_STORAGE_ENDPOINT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from onceflow.core.errors import ConfigError
from onceflow.core.imports import naming_one_extra
from onceflow.core.secret_references import follow_references, has_reference

PART_BYTES = 8 * 1024 * 1024
PART_BYTES_MIN = 5 * 1024 * 1024
"""The smallest part that S3 accepts, except for the last part."""
PARTS_AT_ONCE = 4
"""The number of parts of one object that are uploaded at once, and held in memory."""
REQUEST_TIMEOUT_S = 60.0
RETRY_TIMEOUT_S = 60.0

_SCHEMES: Mapping[str, str] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
}
"""The protocol of each scheme of a url."""
_EXTRAS: Mapping[str, str] = {"s3": "s3", "gs": "gcs", "az": "azure"}
_CREDENTIALS = re.compile(
    "secret|passw|token|sas|credential|access_key|account_key|^key$", re.IGNORECASE
)
_NO_SECRET = frozenset({"access_key_id", "aws_access_key_id", "token_expiration"})
_SECRET_LENGTH_MIN = 4
"""The minimum length of a text that is masked in errors: a shorter one could be part of any word.
"""
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "endpoint_url": "endpoint",
        "region_name": "region",
        "anon": "skip_signature",
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "token",
        "requester_pays": "request_payer",
    },
    "gs": {"token": "service_account", "endpoint": "base_url", "endpoint_url": "base_url"},
    "az": {"anon": "skip_signature", "sas_token": "sas_key", "endpoint_url": "endpoint"},
}
"""The names by which s3fs, gcsfs and adlfs call the same options, and `endpoint` for all three."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_CAUSE = re.compile(r'message: "([^"]+)"')
"""The operating system's message, in the developer details of a client's error."""
_NOISE = re.compile(r"Generic \w+ error: |max_retries: \d+, retry_timeout: \w+ +- ?")
_ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    "s3": ("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("base_url", "GOOGLE_BASE_URL"),
    "az": ("endpoint", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""The places where obstore looks for an endpoint, in that order: an option, then the environment.
"""
_NESTED = frozenset({"client_kwargs"})
_NUMBERS = ("part_bytes", "parts_at_once", "request_timeout_s", "retry_timeout_s")
"""The options of onceflow, which are not passed to obstore."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The timeout of one request, and the time for which it is repeated."""

    request_timeout_s: float = REQUEST_TIMEOUT_S
    retry_timeout_s: float = RETRY_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """A prefix of a bucket. Its pickle includes the options, its text does not."""

    url: str
    """The url of the bucket and prefix; holds no secret."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """Options by the names of obstore or of fsspec's packages. A text may be a secret's reference.
    """
    part_bytes: int = PART_BYTES
    parts_at_once: int = PARTS_AT_ONCE
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        scheme, bucket, _, _ = self._parts()
        authority = self.url.partition("://")[2].partition("/")[0]
        if ":" in authority or ("@" in authority and _SCHEMES.get(scheme) != "az"):
            raise ConfigError(
                f"a {scheme}:// url names a bucket and a prefix; this one holds a user, a password"
                " or a port: set credentials in the environment, and a server as the endpoint"
            )
        if scheme not in _SCHEMES or not bucket:
            raise ConfigError(f"{self.url!r} names no bucket: write s3://bucket/prefix")
        if self.part_bytes < PART_BYTES_MIN:
            raise ConfigError(
                f"{self.url}: part_bytes={self.part_bytes} must be {PART_BYTES_MIN} or more: S3"
                " accepts smaller parts only as the last part"
            )
        if self.parts_at_once < 1:
            raise ConfigError(f"{self.url}: parts_at_once={self.parts_at_once} must be 1 or more")
        if self.patience.request_timeout_s <= 0 or self.patience.retry_timeout_s < 0:
            raise ConfigError(f"{self.url}: a timeout must be over 0")

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> BucketSettings:
        """Return the settings of `options`, which hold onceflow's numbers among obstore's options.

        Raises:
            ConfigError: `url` names no bucket, or a number is out of range.
        """
        numbers = {name: options[name] for name in _NUMBERS if name in options}
        try:
            numbers = {name: float(value) for name, value in numbers.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{url}: {error}; {', '.join(_NUMBERS)} are numbers") from error
        return cls(
            url,
            {name: value for name, value in options.items() if name not in _NUMBERS},
            int(numbers.get("part_bytes", PART_BYTES)),
            int(numbers.get("parts_at_once", PARTS_AT_ONCE)),
            Patience(
                numbers.get("request_timeout_s", REQUEST_TIMEOUT_S),
                numbers.get("retry_timeout_s", RETRY_TIMEOUT_S),
            ),
        )

    @property
    def protocol(self) -> str:
        """The protocol of the bucket: s3, gs or az."""
        return _SCHEMES[self._parts()[0]]

    @property
    def deletes_many(self) -> bool:
        """True if one request may delete many objects, even if some are missing."""
        return self.protocol == "s3" and not self.options.get("disable_bulk_delete")

    @property
    def by_reference(self) -> bool:
        """True if an option is a reference, which may lead to new credentials later."""
        return any(
            isinstance(value, str) and has_reference(value) for value in self._config().values()
        )

    def client(self) -> Any:
        """Return a new client of obstore. Checks the settings.

        Raises:
            MissingExtra: obstore is not installed.
            ConfigError: obstore does not know an option, or a reference cannot be resolved.
        """
        with naming_one_extra(_EXTRAS[self.protocol]):
            from obstore import exceptions, store
        kinds: Mapping[str, Any] = {
            "s3": store.S3Store,
            "gs": store.GCSStore,
            "az": store.AzureStore,
        }
        _, bucket, account, prefix = self._parts()
        config = self._follow_references()
        if account:
            config.setdefault("account_name", account)
        try:
            return kinds[self.protocol](
                bucket,
                prefix=prefix or None,
                config=config,
                client_options=self._client_options(config),
                retry_config=self._retry_config(),
            )
        except (exceptions.BaseError, TypeError, ValueError) as error:
            # Not chained: the error, or its traceback, may quote the options.
            raise ConfigError(f"{self.url}: {self.describe_error(error)[0]}") from None

    def describe_error(self, error: BaseException) -> tuple[str, str]:
        """Return the text of a client's error, without secrets, and the store's error code."""
        text, _, debug = str(error).partition("\n\nDebug source:")
        code = _CODE.search(text)
        message = _MESSAGE.search(text)
        cause = _CAUSE.search(debug)
        text = _NOISE.sub("", text.partition("<?xml")[0]).strip(" :,\n")
        for more in (code and code[1], message and message[1], cause and cause[1]):
            text += f": {more}" if more else ""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        text = " ".join(text.split())  # Azure's messages have several lines
        return f"{type(error).__name__}: {text}", code[1] if code else ""

    def plain_secrets(self) -> tuple[str, ...]:
        """Return the names of options that hold a secret itself, instead of a reference."""
        return tuple(
            name
            for name, value in self._config().items()
            if _is_secret(name) and isinstance(value, str) and not has_reference(value)
        )

    # --- steps --------------------------------------------------------------------------------

    def _parts(self) -> tuple[str, str, str, str]:
        """Return scheme, bucket or container, Azure's account or "", and prefix."""
        scheme, _, address = self.url.partition("://")
        authority, _, prefix = address.partition("/")
        bucket, at, host = authority.partition("@")
        account = host.partition(".")[0] if at else ""
        return scheme.lower(), bucket, account, prefix.strip("/")

    def _config(self) -> dict[str, Any]:
        """Return the options by obstore's names."""
        aliases = _ALIASES[self.protocol]
        config: dict[str, Any] = {}
        for name, value in self.options.items():
            if name == "default_block_size":
                continue
            if name in _NESTED and isinstance(value, Mapping):
                nested = cast("Mapping[str, Any]", value)
                config.update(
                    {
                        aliases.get(inner, inner): inner_value
                        for inner, inner_value in nested.items()
                    }
                )
            else:
                config[aliases.get(name, name)] = value
        return config

    def _follow_references(self) -> dict[str, Any]:
        return {
            name: follow_references(value, setting=f"option {name!r} of {self.url}")
            if isinstance(value, str)
            else value
            for name, value in self._config().items()
        }

    def _secrets(self) -> list[str]:
        """Return each text that must not be printed, longest first."""
        try:
            config = self._follow_references()
        except ConfigError:
            config = self._config()
        secrets = [
            value
            for name, value in config.items()
            if (_is_secret(name) or name in _NO_SECRET)
            and isinstance(value, str)
            and len(value) >= _SECRET_LENGTH_MIN
        ]
        return sorted(secrets, key=len, reverse=True)

    def _client_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        option, *variables = _ENDPOINTS[self.protocol]
        endpoints = (config.get(option), *map(os.environ.get, variables))
        endpoint = str(next(filter(None, endpoints), ""))
        return {
            "timeout": timedelta(seconds=self.patience.request_timeout_s),
            "connect_timeout": timedelta(seconds=min(5.0, self.patience.request_timeout_s)),
            "allow_http": endpoint.startswith("http://"),
        }

    def _retry_config(self) -> Any:
        return {
            "max_retries": 1000,  # the timeout ends the retries
            "retry_timeout": timedelta(seconds=self.patience.retry_timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=3),
                "base": 2,
            },
        }


def is_bucket(url: str) -> bool:
    """Return True if `url` has a scheme of a bucket that `BucketSettings` knows."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme.lower() in _SCHEMES


def _is_secret(name: str) -> bool:
    return name.lower() not in _NO_SECRET and _CREDENTIALS.search(name) is not None
