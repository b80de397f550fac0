"""The driver's endpoint with a certificate and a token file: who may ask, and who is refused."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import ssl
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.runtime.test_job_commands import a_job, asked, await_running, finish, run, sink_of

_DAY = dt.timedelta(days=1)


class _Authority:
    """Signs certificates, as a company's own does."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = self._signed(name, self._key, self._name, is_authority=True)

    def issue(self, host: str) -> tuple[Path, Path]:
        """Return the files of a certificate for `host`, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        path = self._directory / f"{host}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return self._signed(host, key, name, is_authority=False), path

    def _signed(
        self, host: str, key: ec.EllipticCurvePrivateKey, name: x509.Name, *, is_authority: bool
    ) -> Path:
        now = dt.datetime.now(dt.timezone.utc)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=is_authority,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(own, critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        path = self._directory / f"{host}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def _asked_over(connection: http.client.HTTPConnection, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request("GET", "/v1/status", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.only_proof
def test_an_endpoint_with_tls_and_a_token_file_is_asked_by_who_has_both_and_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = _Authority(tmp_path, "ours"), _Authority(tmp_path, "theirs")
    certificate, key = ours.issue("localhost")
    token_file = tmp_path / "token"
    for name, value in {
        "HOST": "localhost",
        "CERTIFICATE": str(certificate),
        "KEY": str(key),
        "AUTHORITY": str(ours.path),
        "TOKEN_FILE": str(token_file),
    }.items():
        monkeypatch.setenv(f"ONCEFLOW_ENDPOINT_{name}", value)
    job = tmp_path / "checkpoints" / "ledger"
    with a_job(tmp_path) as process:
        assert await_running(tmp_path, "--token-file", str(token_file))["state"] == "running"
        url: str = json.loads((job / "driver.json").read_text())["url"]
        assert url.startswith("https://localhost:")
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert not (job / "driver.token").exists(), "who reads the storage has no token"
        token, port = token_file.read_text().strip(), urlsplit(url).port
        trusting = ssl.create_default_context(cafile=str(ours.path))
        trusting_others = ssl.create_default_context(cafile=str(theirs.path))

        def over_tls(context: ssl.SSLContext) -> http.client.HTTPSConnection:
            return http.client.HTTPSConnection("localhost", port, timeout=10, context=context)

        # Without the token, with another one, without TLS, and where another authority is trusted.
        assert _asked_over(over_tls(trusting)) == 401
        assert _asked_over(over_tls(trusting), "another") == 401
        # (No instance is named, so who has the token is told that somebody else was meant.)
        assert _asked_over(over_tls(trusting), token) in {200, 421}
        with pytest.raises(ssl.SSLCertVerificationError):
            _asked_over(over_tls(trusting_others), token)
        try:
            plain = _asked_over(http.client.HTTPConnection("localhost", port, timeout=10), token)
        except (OSError, http.client.HTTPException):
            plain = 400
        assert plain == 400
        # The command line: wrong, and right.
        (tmp_path / "old token").write_text("the-token-of-an-older-driver")
        exit_status, _, error = run(tmp_path, "stop", "--token-file", str(tmp_path / "old token"))
        assert (exit_status, "rejects the token" in error) == (1, True)
        right = ("--token-file", str(token_file))
        exit_status, _, error = run(tmp_path, "stop", "--authority", str(theirs.path), *right)
        assert (exit_status, "certificate verify failed" in error) == (3, True)
        exit_status, _, error = run(tmp_path, "stop")
        assert (exit_status, "give a copy of that file with --token-file" in error) == (3, True)
        place = asked(tmp_path, "savepoint", "--native", *right)["result"]
        assert Path(place, "_metadata").exists()
        assert asked(tmp_path, "stop", *right)["state"] == "done"
        assert process.wait(90) == 0
    assert not (job / "driver.json").exists()
    assert sink_of(tmp_path).prepared() == []
    finish(tmp_path)
