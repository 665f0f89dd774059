//! The admin plane's page: its headers, its content security policy, and who may load it. `tests/ui` uses it in a
//! browser.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::Method;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::support::files::File;
use crate::support::{Answer, Client, Fixture, Fleet, TEXTS, alone, canned, plain_model, reloadable};

/// SHA-256 of "admin-secret".
const TOKEN_SHA256: &str = "16175223c8ddce5ace0493c948569c211b03c4c6bb3d3e484434999448cffe01";
const HTML: [(&str, &str); 1] = [("accept", "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8")];

/// The content of the only such element.
fn inside<'a>(page: &'a str, tag: &str) -> &'a str {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    assert_eq!(page.matches(&open).count(), 1, "{open}");
    page.split_once(&open).unwrap().1.split_once(&close).unwrap().0
}

fn check(answer: &Answer) {
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "text/html; charset=utf-8");
    let page = std::str::from_utf8(&answer.body).unwrap();
    assert!(page.len() < 150_000, "{} bytes", page.len());
    let policy = answer.header("content-security-policy");
    for tag in ["script", "style"] {
        let digest = STANDARD.encode(Sha256::digest(inside(page, tag)));
        assert!(policy.contains(&format!("{tag}-src 'sha256-{digest}'")), "{tag}: {policy}");
    }
    for rule in ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"] {
        assert!(policy.contains(rule), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    // Nothing turns text into markup, and nothing loads from other hosts.
    for forbidden in
        ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=\"", "src=", "localStorage"]
    {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    let addresses = page.split("http").skip(1).filter(|rest| rest.starts_with("://") || rest.starts_with("s://"));
    assert!(addresses.clone().all(|rest| rest.starts_with("://www.w3.org/2000/svg")), "{}", addresses.count());
}

#[tokio::test]
async fn browsers_get_the_page_and_programs_the_list() {
    let Fleet { mocks: [_mock], gateway, client } = alone(1, "").await;
    let admin = Client::admin(&gateway);
    check(&admin.get("/ui").await);
    check(&admin.call(Method::GET, "/", &HTML, "").await);
    let list = admin.get("/").await;
    assert!(list.json()["routes"]["GET /ui"].is_string(), "{list:?}");
    assert_eq!(list.header("vary"), "Accept");
    // The guard protects it like every route of this listener.
    assert_eq!(admin.call(Method::GET, "/ui", &[("host", "evil.example")], "").await.status, 403);
    assert_eq!(client.get("/ui").await.status, 404);
}

#[tokio::test]
async fn without_the_token_there_is_a_page_and_no_data() {
    let mock = canned(1);
    let file = File::new(&format!("admin_token_sha256 = \"{TOKEN_SHA256}\""), &plain_model(&mock, 1));
    let gateway = file.start().await;
    let admin = Client::admin(&gateway);
    check(&admin.get("/ui").await);
    check(&admin.call(Method::GET, "/", &HTML, "").await);
    for path in ["/", "/admin/overview", "/metrics"] {
        assert_eq!(admin.get(path).await.status, 401, "{path}");
    }
    assert_eq!(admin.call(Method::GET, "/admin/overview", &HTML, "").await.status, 401);
    let good = [("authorization", "Bearer admin-secret")];
    assert_eq!(admin.call(Method::GET, "/admin/overview", &good, "").await.status, 200);
}

#[tokio::test]
async fn the_overview_is_what_its_parts_say() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = reloadable(&mock, &fixture, "").await;
    let admin = Client::admin(&gateway);
    admin.post("/admin/reload", "").await;
    let command = json!({ "backend": "pod-a", "path": "missing" }).to_string();
    assert_eq!(admin.post("/admin/tables", command).await.status, 422);
    assert_eq!(Client::data(&gateway).post("/generate", json!({ "text": TEXTS[0] }).to_string()).await.status, 200);
    crate::support::settled(&gateway).await;
    let overview = admin.get("/admin/overview").await.json();
    for part in ["backends", "tables", "live", "routing"] {
        let mut alone = admin.get(&format!("/admin/{part}")).await.json();
        let mut within = overview[part].clone();
        // These decay over time.
        for value in [&mut alone, &mut within] {
            for rank in
                value.pointer_mut("/backends/0/ranks").and_then(|ranks| ranks.as_array_mut()).into_iter().flatten()
            {
                rank["recent_tokens"].take();
                rank["price"].take();
            }
        }
        assert_eq!(within, alone, "{part}");
    }
    let config = admin.get("/admin/config").await.json();
    for field in ["last_reload", "file", "started_unix_seconds"] {
        assert_eq!(overview[field], config[field], "{field}");
    }
    assert!(overview["last_reload"]["outcome"].is_string() && overview["tables"]["errors"][0]["cause"].is_string());
    assert!(
        (overview["unix_seconds"].as_f64().unwrap() - config["started_unix_seconds"].as_f64().unwrap()).abs() < 600.0
    );
}
