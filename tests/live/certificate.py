"""A certificate for 127.0.0.1 that is its own authority."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Certificate:
    def __init__(self, folder: Path) -> None:
        private = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        today = datetime.datetime.now(datetime.UTC)
        built = (
            x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=1))
            .add_extension(address, critical=False)
            .sign(private, hashes.SHA256())
        )
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
