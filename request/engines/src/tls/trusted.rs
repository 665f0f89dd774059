//! Decides which engine certificates to trust: those signed by an authority or listed explicitly.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::SharedError;

use super::{TlsError, certificates, provider, roots};

/// The certificates in one file: authorities, or a server's own self-signed certificate, as created by `openssl req
/// -x509`. The latter claims to be an authority, and rustls rejects servers that present an authority's certificate.
#[derive(Debug)]
pub(super) struct OwnCertificates {
    named: Vec<CertificateDer<'static>>,
    authorities: Arc<WebPkiServerVerifier>,
}

impl OwnCertificates {
    pub(super) fn load(path: &Path) -> Result<Self, TlsError> {
        let authorities = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(path)?), provider()).build();
        let authorities = authorities.map_err(|error| TlsError::Settings(error.into()))?;
        Ok(Self { named: certificates(path)?, authorities })
    }
}

impl ServerCertVerifier for OwnCertificates {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.authorities.verify_server_cert(shown, intermediates, name, ocsp, now);
        // An invalid time, signature or purpose yields a different error.
        let is_authority = matches!(verified, Err(Error::InvalidCertificate(CertificateError::Other(_))));
        if !is_authority || !self.named.contains(shown) {
            return verified;
        }
        match rustls::client::verify_server_name(&ParsedCertificate::try_from(shown)?, name) {
            // The certificate has no names, but the operator listed exactly this one, so it is the engine's.
            Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }))
                if presented.is_empty() => {}
            checked => checked?,
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls12_signature(message, shown, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls13_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

/// Returns the system's trusted authorities.
pub(super) fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    // A system's bundle may contain old certificates that cannot be parsed.
    let (added, _) = store.add_parsable_certificates(found.certs);
    if added == 0 {
        let error = found.errors.into_iter().next();
        return Err(TlsError::System(error.map_or_else(|| "none were found".into(), SharedError::from)));
    }
    Ok(store)
}
