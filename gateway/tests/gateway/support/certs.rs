//! Certificates made for one test.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use semmoe_engines::http::ClientSettings;
use semmoe_engines::tls::{ClientFiles, ClientTls};
use tempfile::TempDir;

static MADE: AtomicU32 = AtomicU32::new(0);

/// A certificate authority and the files of certificates that it signed.
pub(crate) struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Two authorities with one name would be indistinguishable up to the signature.
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        params.distinguished_name.push(DnType::CommonName, format!("authority {number}"));
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes NAME.pem and NAME.key.
    pub(crate) fn sign(&self, name: &str, subject: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![subject.to_owned()]).unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
        std::fs::write(self.file(&format!("{name}.pem")), signed.pem()).unwrap();
    }

    /// Writes NAME.pem and NAME.key of a self-signed certificate, as `openssl req -x509` makes it: it claims to be an
    /// authority, and without subjects it has only a common name.
    pub(crate) fn own(&self, name: &str, subjects: &[&str], is_expired: bool) {
        let key = KeyPair::generate().unwrap();
        let subjects: Vec<String> = subjects.iter().map(|subject| (*subject).to_owned()).collect();
        let mut params = CertificateParams::new(subjects).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "127.0.0.1");
        if is_expired {
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        }
        std::fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
        std::fs::write(self.file(&format!("{name}.pem")), params.self_signed(&key).unwrap().pem()).unwrap();
    }

    /// A section such as `[server.tls]` with the certificate NAME.
    pub(crate) fn section(&self, section: &str, name: &str) -> String {
        let (cert, key) = (self.file(&format!("{name}.pem")), self.file(&format!("{name}.key")));
        format!("[{section}]\ncert = {cert:?}\nkey = {key:?}\n")
    }

    /// A client that trusts this authority and, with a name, presents that certificate.
    pub(crate) fn client(&self, http2: bool, name: Option<&str>) -> ClientSettings {
        let file = |kind: &str| name.map(|name| self.file(&format!("{name}.{kind}")));
        let files =
            ClientFiles { ca: Some(self.file("ca.pem")), cert: file("pem"), key: file("key"), server_name: None };
        let tls = Some(Arc::new(ClientTls::load(files, http2).unwrap()));
        ClientSettings { tls, http2, ..ClientSettings::default() }
    }
}
