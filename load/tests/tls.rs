//! https: certificates are checked, and an untrusted server is an error before the run.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::*;
use semmoe_load::{Limit, Pace};

/// A server with a self-signed certificate for `name`, and the certificate. It answers requests in pairs: one client
/// alone could otherwise finish a short run before a busy machine has started the other.
fn server(name: &str) -> (Mock, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let cert = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().self_signed(&key).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key.serialize_der().try_into().unwrap())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let both = Arc::new(tokio::sync::Barrier::new(2));
    let list = r#"{"data":[{"id":"solo"}]}"#;
    let mock = Mock::start_with(acceptor, move |seen| {
        let both = Arc::clone(&both);
        async move {
            if seen.is_get() {
                return send(document("", list));
            }
            both.wait().await;
            send(chat(""))
        }
    });
    (mock, cert.pem())
}

#[tokio::test]
async fn a_server_is_believed_by_its_certificate_and_name() {
    for (name, believed, works) in
        [("127.0.0.1", true, true), ("elsewhere.example", true, false), ("127.0.0.1", false, false)]
    {
        let (mock, cert) = server(name);
        let (_, other) = server(name);
        let mut options = mock.options(Pace::Closed { concurrency: 2 }, Limit::Requests(20));
        options.tls.ca = Some(mock.file("ca.pem", &[if believed { &cert } else { &other }]));
        // Also queried over TLS.
        options.model = None;
        match semmoe_load::run(options, &|_| {}, std::future::pending()).await {
            Ok(report) => {
                assert!(works, "{name}, {believed}");
                assert_eq!((report.requests.ok, report.generator.connections), (20, 2));
                assert_eq!(report.model.as_deref(), Some("solo"));
            }
            Err(error) => assert!(!works && error.to_string().contains("certificate"), "{name}, {believed}: {error}"),
        }
    }
}

#[tokio::test]
async fn certificates_that_cannot_be_read_are_input() {
    let mock = Mock::with_bytes("");
    let mut options = mock.options(Pace::Closed { concurrency: 1 }, Limit::Requests(1));
    options.url = "https://127.0.0.1:1".parse().unwrap();
    options.tls.ca = Some(mock.file("ca.pem", &["nothing"]));
    let error = semmoe_load::run(options, &|_| {}, std::future::pending()).await.unwrap_err();
    assert!(error.is_input() && error.to_string().contains("ca.pem"), "{error}");
}
