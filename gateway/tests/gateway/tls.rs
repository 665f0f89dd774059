//! TLS to clients and to engines, and the errors when certificates do not match.

use std::path::Path;
use std::sync::Arc;

use http::{Method, Version};
use semmoe_engines::http::{AnswerLimits, ClientSettings, HttpClient};
use semmoe_engines::tls::{ClientFiles, ClientTls};
use semmoe_gateway::{Config, Gateway, Running};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::certs::Authority;
use crate::support::{
    Client, Fleet, PATIENCE, alone, canned, config, eventually, metric, next_frame, plain_model, rest_of, settled,
    start, start_bare,
};

const CHAT: &str = "/v1/chat/completions";

fn url(gateway: &Running) -> String {
    gateway.data_url()
}

#[tokio::test]
async fn clients_speak_either_http_over_tls() {
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1");
    let Fleet { mocks: [mock], gateway, .. } = alone(1, &authority.section("server.tls", "server")).await;
    for (http2, version) in [(false, Version::HTTP_11), (true, Version::HTTP_2)] {
        let client = Client::with(&authority.client(http2, None), &url(&gateway));
        let mut answer = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
        assert_eq!((answer.status().as_u16(), answer.version()), (200, version));
        for event in 1..=2 {
            mock.release(1);
            assert_eq!(next_frame(&mut answer).await, Some(format!("data: {event}\n\n")));
        }
        mock.release(1);
        let rest = rest_of(&mut answer).await;
        assert_eq!(rest, "data: 3\n\ndata: [DONE]\n\n");
        assert_eq!(client.get("/v1/models").await.status, 200);
        assert_eq!(client.get("/flush_cache").await.status, 404);
    }
    settled(&gateway).await;
    assert!(metric(&gateway, "semmoe_tls_handshakes_total{outcome=\"ok\"}").await >= 2.0);
    // A client of another authority rejects it, and a plain-text client gets no answer.
    let stranger = Client::with(&Authority::new().client(false, None), &url(&gateway));
    assert!(stranger.refusal("/v1/models").await.contains("UnknownIssuer"));
    let mut plain = TcpStream::connect(gateway.data_addr()).await.unwrap();
    plain.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut said = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut said)).await.expect("closed in time");
    assert!(!said.starts_with(b"HTTP"), "{said:?}");
}

#[tokio::test]
async fn clients_may_have_to_show_a_certificate() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.sign("server", "127.0.0.1");
    authority.sign("client", "team-a.example");
    other.sign("client", "team-a.example");
    let mock = canned(1);
    let ca = authority.file("ca.pem");
    let tls = authority.section("server.tls", "server");
    let gateway = start(&format!("{tls}client_ca = {ca:?}\nmin_version = \"1.3\"\n{}", plain_model(&mock, 1))).await;
    let good = Client::with(&authority.client(true, Some("client")), &url(&gateway));
    assert_eq!(good.get("/v1/models").await.status, 200);
    let without = Client::with(&authority.client(false, None), &url(&gateway));
    let _ = without.refusal("/v1/models").await;
    assert!(metric(&gateway, "semmoe_tls_handshakes_total{outcome=\"failed\"}").await >= 1.0);
}

#[tokio::test]
async fn the_admin_plane_over_tls() {
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1");
    let mock = canned(1);
    let section = authority.section("server.admin_tls", "server");
    let gateway = start(&format!("{section}{}", plain_model(&mock, 1))).await;
    let url = gateway.admin_url();
    for http2 in [false, true] {
        let client = Client::with(&authority.client(http2, None), &url);
        assert_eq!(client.get("/admin/backends").await.status, 200, "http2: {http2}");
    }
    assert_eq!(Client::data(&gateway).get("/v1/models").await.status, 200, "the data plane is plain");
}

/// A client that connects and sends nothing is not waited for.
#[tokio::test]
async fn a_handshake_has_its_time() {
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1");
    let mock = canned(1);
    let tls = authority.section("server.tls", "server");
    let toml = format!("{tls}[timeouts]\nhandshake_seconds = 0.05\n{}", plain_model(&mock, 1));
    let gateway = start(&toml).await;
    let mut silent = TcpStream::connect(gateway.data_addr()).await.unwrap();
    let read = tokio::time::timeout(PATIENCE, silent.read_u8()).await.expect("closed in time");
    assert!(read.is_err());
    assert_eq!(metric(&gateway, "semmoe_tls_handshakes_total{outcome=\"timeout\"}").await, 1.0);
}

/// A complete first flight of a client's handshake.
fn client_hello(authority: &Authority) -> Vec<u8> {
    let roots = semmoe_engines::tls::roots(&authority.file("ca.pem")).unwrap();
    let provider = semmoe_engines::tls::provider();
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut client = rustls::ClientConnection::new(config.into(), "127.0.0.1".try_into().unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// Handshakes are computed one at a time here, and each may last a minute: clients that send nothing, stop midway, or
/// wait forever take no slot. There are more of them than places on the admin plane.
#[tokio::test]
async fn silent_clients_hold_up_no_handshake() {
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1");
    let mock = canned(1);
    let tls = authority.section("server.tls", "server") + &authority.section("server.admin_tls", "server");
    let toml = format!("{tls}[limits]\nhandshakes = 1\n[timeouts]\nhandshake_seconds = 60\n{}", plain_model(&mock, 1));
    let gateway = start(&toml).await;
    let hello = client_hello(&authority);
    let mut silent = Vec::new();
    for address in [gateway.data_addr(), gateway.admin_addr()] {
        for number in 0..140 {
            let mut socket = TcpStream::connect(address).await.unwrap();
            socket.write_all(&hello[..[0, 1, hello.len() / 2, hello.len()][number % 4]]).await.unwrap();
            silent.push(socket);
        }
    }
    let client = HttpClient::new(&authority.client(false, None));
    for (base, path) in [(gateway.data_url(), "/v1/models"), (gateway.admin_url(), "/metrics")] {
        let text = client.get_text(&base.parse().unwrap(), path, &AnswerLimits::default()).await.unwrap();
        if path == "/metrics" {
            let waited = text.contains("semmoe_tls_handshakes_total{outcome=\"timeout\"}");
            assert!(!waited && text.contains("semmoe_connections_displaced_total "), "{text}");
        }
    }
}

/// Returns once a client of `authority` is served.
async fn believed(authority: &Authority, gateway: &Running) {
    let wait = async {
        let path = "/v1/models";
        loop {
            // A new client each time: a resumed session shows no certificate.
            let settings = authority.client(false, None);
            let client = HttpClient::new(&settings);
            let base = url(gateway).parse().unwrap();
            if client.get_text(&base, path, &AnswerLimits::default()).await.is_ok() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the new certificate in time");
}

#[tokio::test]
async fn changed_certificates_are_read_again() {
    let (old, new) = (Authority::new(), Authority::new());
    for authority in [&old, &new] {
        authority.sign("server", "127.0.0.1");
    }
    let mock = canned(1);
    let toml = format!(
        "credentials_interval_seconds = 0.01\n{}{}",
        old.section("server.tls", "server"),
        plain_model(&mock, 1)
    );
    let gateway = start_bare(&toml).await;
    believed(&old, &gateway).await;
    // A certificate without its key changes nothing.
    let failed = "semmoe_credential_reloads_total{outcome=\"failed\"}";
    std::fs::copy(new.file("server.pem"), old.file("server.pem")).unwrap();
    eventually("a failed reload", async || metric(&gateway, failed).await >= 1.0).await;
    believed(&old, &gateway).await;
    std::fs::copy(new.file("server.key"), old.file("server.key")).unwrap();
    believed(&new, &gateway).await;
    assert!(metric(&gateway, "semmoe_credential_reloads_total{outcome=\"ok\"}").await >= 1.0);
}

/// A gateway serves as an engine with TLS and HTTP/2.
#[tokio::test]
async fn engines_over_tls_and_http2() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.sign("server", "127.0.0.1");
    authority.sign("gateway", "gateway.example");
    let mut mock = canned(1);
    let plain = start(&plain_model(&mock, 1)).await;
    let (tls, ca) = (authority.section("server.tls", "server"), authority.file("ca.pem"));
    let secure = start(&format!("{tls}client_ca = {ca:?}\n{}", plain_model(&mock, 1))).await;
    let plain_url = format!("http://{}", plain.data_addr());
    let shown = authority.section("models.backends.tls", "gateway");
    for (engine, http2, more) in [
        (&plain_url, true, String::new()),
        (&url(&secure), false, format!("{shown}ca = {ca:?}\n")),
        (&url(&secure), true, format!("{shown}ca = {ca:?}\nserver_name = \"127.0.0.1\"\n")),
    ] {
        let model = "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"front\"\n";
        let front = start(&format!("{model}engine = \"openai\"\nurl = \"{engine}\"\nhttp2 = {http2}\n{more}")).await;
        assert!(front.health("front").unwrap().is_healthy(), "{engine} {http2}: {:?}", front.health("front"));
        let client = Client::data(&front);
        let body = "{\"model\":\"tiny\",\"messages\":[]}";
        assert_eq!(client.post(CHAT, body).await.status, 200);
        assert_eq!(mock.next().await.body, body);
        // A client's disconnect propagates through both.
        let call = client.begin_with(CHAT, "hang", body);
        mock.next().await;
        call.abort();
        mock.next_gone().await;
        settled(&front).await;
    }
    // An untrusted engine receives no request, and the cause is logged.
    let ca = other.file("ca.pem");
    for (more, says) in [
        (format!("{shown}ca = {ca:?}\n"), "UnknownIssuer"),
        (
            format!("{shown}ca = {:?}\nserver_name = \"other.example\"\n", authority.file("ca.pem")),
            "not valid for name",
        ),
    ] {
        let model = "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"front\"\n";
        let front = start(&format!("{model}engine = \"openai\"\nurl = \"{}\"\n{more}", url(&secure))).await;
        let health = format!("{:?}", front.health("front").unwrap());
        assert!(health.contains("Unhealthy") && health.contains(says), "expected '{says}' in {health}");
    }
}

#[tokio::test]
async fn certificates_that_cannot_be_used_are_reported_before_serving() {
    let (authority, other) = (Authority::new(), Authority::new());
    for one in [&authority, &other] {
        one.sign("server", "127.0.0.1");
    }
    let mock = canned(1);
    let key = authority.file("server.key");
    let empty = authority.file("empty.pem");
    std::fs::write(&empty, "nothing").unwrap();
    let good = authority.section("server.tls", "server");
    for (section, says) in [
        (good.replace("server.pem", "none.pem"), "server.tls: cannot use "),
        (good.replace("server.pem", "empty.pem"), "contains no certificate"),
        (good.replace("server.key", "server.pem"), "contains no private key"),
        (good.replace(&key.display().to_string(), &other.file("server.key").display().to_string()), "KeyMismatch"),
        (format!("{good}client_ca = {empty:?}\n"), "contains no certificate"),
        (format!("{good}client_ca = {key:?}\n"), "contains no certificate"),
        (authority.section("server.admin_tls", "none"), "server.admin_tls: cannot use "),
    ] {
        let config = config(&format!("{section}{}", plain_model(&mock, 1)));
        let error = Gateway::check(&config).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(says) && !error.contains("PRIVATE"), "expected '{says}' in '{error}'");
        assert_eq!(Gateway::start(config).await.unwrap_err().to_string(), error);
    }
    let https = plain_model(&mock, 1).replace("http:", "https:");
    let backend = config(&format!("{https}[models.backends.tls]\nca = {empty:?}\n"));
    let error = Gateway::check(&backend).await.map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("backend 'pod-a': cannot use "), "{error}");
    let text = |more: &str| format!("{}[models.backends.tls]\n{more}\n", plain_model(&mock, 1));
    for (text, says) in [
        (text("ca = \"x\""), "models[0].backends[0].tls: set, but no URL"),
        (text("cert = \"x\"").replace("http:", "https:"), "models[0].backends[0].tls.key: must be set"),
        (text("key = \"x\"").replace("http:", "https:"), "models[0].backends[0].tls.cert: must be set"),
        (format!("{good}min_version = \"1.1\"\n{}", plain_model(&mock, 1)), "unknown variant `1.1`"),
    ] {
        let error = Config::from_toml(&text, Path::new("")).unwrap_err().to_string();
        assert!(error.contains(says), "expected '{says}' in '{error}'");
    }
}

/// A self-signed certificate is trusted as its own authority, for its names and its validity; no other of its kind is.
#[tokio::test]
async fn a_certificate_that_signed_itself_is_its_own_authority() {
    let authority = Authority::new();
    let mock = canned(1);
    authority.own("other", &["127.0.0.1"], false);
    for (name, subjects, is_expired, says) in [
        ("named", &["127.0.0.1"][..], false, None),
        ("nameless", &[], false, None),
        ("expired", &["127.0.0.1"], true, Some("expired")),
        ("elsewhere", &["engine.example"], false, Some("not valid for name")),
    ] {
        authority.own(name, subjects, is_expired);
        let gateway = start(&format!("{}{}", authority.section("server.tls", name), plain_model(&mock, 1))).await;
        for (ca, says) in [(name, says), ("other", Some("invalid peer certificate"))] {
            for http2 in [false, true] {
                let files = ClientFiles { ca: Some(authority.file(&format!("{ca}.pem"))), ..ClientFiles::default() };
                let tls = Some(Arc::new(ClientTls::load(files, http2).unwrap()));
                let client =
                    Client::with(&ClientSettings { tls, http2, ..ClientSettings::default() }, &gateway.data_url());
                let answer = client.try_open(Method::GET, "/v1/models", &[], "").await.map(|answer| answer.status());
                match says {
                    None => assert_eq!(answer.unwrap(), 200, "{name} by {ca}"),
                    Some(says) => {
                        let error = answer.unwrap_err().to_string();
                        assert!(error.contains(says), "{name} by {ca}: expected '{says}' in {error}");
                    }
                }
            }
        }
    }
}
