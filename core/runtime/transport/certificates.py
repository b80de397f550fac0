"""Creates certificates: an authority whose key is not stored, and the certificates it signs."""

from __future__ import annotations

from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """An authority that signs certificates of one period. Only this object has its key."""

    def __init__(self, begins: datetime, ends: datetime) -> None:
        self._period = (begins, ends)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("onceflow attempt")
        unsigned = self._begin_certificate(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.certificate = _pem(unsigned.sign(self._key, hashes.SHA256()))

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Return (certificate, key), both PEM, of a new server and client called `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        unsigned = (
            self._begin_certificate(_name(name), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        key_pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return _pem(unsigned.sign(self._key, hashes.SHA256())), key_pem

    def _begin_certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        begins, ends = self._period
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
