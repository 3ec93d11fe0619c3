"""The certificates of a deployment and the keys of its nodes: made, and read back for checks.

One authority signs one server certificate; a node verifies the server by the authority's certificate and is known to
the server by the public half of a key of its own. All keys are on the curve P-384, which Flower asks for.
"""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BEFORE = timedelta(minutes=5)  # a certificate is valid at once on machines whose clocks are a little behind


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


def authority(days: int = AUTHORITY_DAYS) -> Pair:
    """A new authority that may sign server certificates, and nothing below them."""
    key = ec.generate_private_key(ec.SECP384R1())
    serial = x509.random_serial_number()
    name = _name(f"fedprior deployment {serial:x}"[:40])  # two authorities are never taken for each other
    usage = _usage(key_cert_sign=True, crl_sign=True)
    certificate = (
        _builder(name, name, key.public_key(), serial, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def server(signer: Pair, names: tuple[str, ...], days: int) -> Pair:
    """A new key and a certificate for it that is good for `names` (host names and IP addresses) and for this machine
    itself, valid for `days` from now; with a negative number it has expired."""
    issuer = x509.load_pem_x509_certificate(signer.certificate)
    issuer_key = load_key(signer.key)
    key = ec.generate_private_key(ec.SECP384R1())
    hosts = list(dict.fromkeys((*names, *LOOPBACK)))
    certificate = (
        _builder(_name(hosts[0][:64]), issuer.subject, key.public_key(), x509.random_serial_number(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA384())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def node_key(comment: str) -> tuple[bytes, bytes]:
    """-> (private key, public key with `comment`), both in the form of `ssh-keygen -t ecdsa -b 384`."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b" " + comment.encode() + b"\n"


def load_key(data: bytes) -> ec.EllipticCurvePrivateKey:
    """A private key as written here. Raises ValueError for anything else."""
    load = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:  # encrypted, or of a kind that nobody made here
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("no key on an elliptic curve")
    return key


def public_pem(data: bytes) -> bytes:
    """A public key file of a node as Flower's SuperLink knows it. Raises ValueError for anything else."""
    try:
        key = serialization.load_ssh_public_key(data)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("no key on an elliptic curve")
    return _public(key)


def public_of(private: bytes) -> bytes:
    """The public half of a private key, in the form of `public_pem`."""
    return _public(load_key(private).public_key())


@dataclass(frozen=True)
class Facts:
    """What a certificate says. `days` are those left from now, negative once it has expired."""

    names: tuple[str, ...]
    days: float
    issued_by: bool
    belongs: bool


def facts(certificate: Path, key: Path, issuer: Path) -> Facts:
    """`issued_by` is whether the authority in `issuer` signed it, `belongs` whether the key is its own.

    Raises ValueError or OSError for files that cannot be read.
    """
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    try:
        extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = tuple(str(name.value) for name in extension)
    except x509.ExtensionNotFound:
        names = ()
    try:
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(issuer.read_bytes()))
        issued = True
    except (InvalidSignature, TypeError, ValueError):
        issued = False
    mine = found.public_key() == load_key(key.read_bytes()).public_key()
    return Facts(names, days_left(certificate), issued, mine)


def days_left(certificate: Path) -> float:
    """Days until a certificate expires. Raises ValueError or OSError where the file cannot be read."""
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    return (found.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, days: int
) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + timedelta(days=days)
    start = min(datetime.now(UTC) - BEFORE, end - timedelta(days=1))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
