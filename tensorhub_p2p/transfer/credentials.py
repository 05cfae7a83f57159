"""Keys for both wires, derived from the cluster's secret alone.

Theory. Every member derives the same keys from the same secret, with no exchange and no
authority: a CURVE key pair for ZeroMQ, and an Ed25519 key with a self-signed certificate
for TLS 1.3. Serial and dates of the certificate are fixed and Ed25519 signatures are
deterministic, so all members have the same certificate, byte for byte, and each trusts
exactly that one. Both ends present it: who lacks the secret can neither serve nor read.

The derivation (HKDF-SHA256, RFC 5869) adds no strength to a secret: use a random one, as
`tensorhub-p2p keygen` makes.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

_SALT = b"tensorhub_p2p/1"
_SERIAL = 1
# Clocks of workers may be anything: the certificate is valid at every time that X.509 knows.
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)


def _derive(secret: str, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), length=32, salt=_SALT, info=purpose).derive(secret.encode())


@dataclass(frozen=True)
class Credentials:
    """What one cluster secret gives. Make it with `from_secret`."""

    curve_public: bytes
    """CURVE public key, 32 bytes; ZeroMQ wants it in Z85."""
    curve_secret: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    """PEM."""
    key: bytes = field(repr=False)
    """PEM, PKCS#8, unencrypted."""

    @classmethod
    def from_secret(cls, secret: str) -> Credentials:
        """Raises ValueError for an empty secret."""
        if not secret:
            raise ValueError("the cluster secret is empty: leave it out, or give a random one")
        curve_secret = _derive(secret, b"curve")
        public = X25519PrivateKey.from_private_bytes(curve_secret).public_key().public_bytes_raw()
        key = Ed25519PrivateKey.from_private_bytes(_derive(secret, b"tls ed25519"))
        pem = serialization.Encoding.PEM
        return cls(
            curve_public=public,
            curve_secret=curve_secret,
            certificate=_self_signed(key).public_bytes(pem),
            key=key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for the listening side; wants the same certificate of the other end."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for the dialling side. Host names are not checked, the certificate is."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.certificate.decode())
        # ssl loads a key from a path only: one in memory where there is such a thing.
        with _PrivateFile(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


def _self_signed(key: Ed25519PrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tensorhub_p2p member")])
    public = key.public_key()
    return (
        x509.CertificateBuilder(name, name, public, _SERIAL, _NOT_BEFORE, _NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, None)
    )


class _PrivateFile:
    """A path at which `content` can be read for a moment, by this user only."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> str:
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            self._fd = os.memfd_create("tensorhub_p2p-key", os.MFD_CLOEXEC)
            self._path = ""
        else:
            self._fd, self._path = tempfile.mkstemp()
        with open(self._fd, "wb", closefd=False) as file:
            file.write(self._content)
        return self._path or f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._path:
            os.unlink(self._path)
