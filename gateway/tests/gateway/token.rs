//! The admin plane's token, on every route.

use http::Method;
use serde_json::Value;

use crate::support::files::File;
use crate::support::{Client, canned, plain_model};

/// SHA-256 of "admin-secret".
const DIGEST: &str = "16175223c8ddce5ace0493c948569c211b03c4c6bb3d3e484434999448cffe01";
const GOOD: [(&str, &str); 1] = [("authorization", "Bearer admin-secret")];

#[tokio::test]
async fn every_admin_route_asks_for_the_token() {
    let mock = canned(1);
    let file = File::new(&format!("admin_token_sha256 = \"{DIGEST}\""), &plain_model(&mock, 1));
    let gateway = file.start().await;
    gateway.wait_ready().await;
    let admin = Client::admin(&gateway);
    let document = admin.call(Method::GET, "/admin/openapi.json", &GOOD, "").await;
    assert_eq!(document.status, 200, "{document:?}");
    let paths = document.json()["paths"].as_object().unwrap().clone();
    let mut asked = 0;
    for (path, operations) in &paths {
        for method in operations.as_object().unwrap().keys() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let path = path.replace("{name}", "pod-a");
            let is_open = ["/healthz", "/readyz", "/ui"].contains(&path.as_str());
            for headers in [&[][..], &[("authorization", "Bearer wrong")], &[("authorization", "admin-secret")]] {
                let answer = admin.call(method.clone(), &path, headers, "").await;
                assert_eq!(answer.status == 401, !is_open, "{method} {path} {headers:?}: {answer:?}");
                if !is_open {
                    assert_eq!(answer.json()["error"]["code"], "token_needed");
                    asked += 1;
                }
            }
            assert_ne!(admin.call(method.clone(), &path, &GOOD, "").await.status, 401, "{method} {path}");
        }
    }
    assert!(asked > 30, "{asked}");
    // A missing route looks like any other to strangers.
    assert_eq!(admin.get("/nothing").await.status, 401);
    // A foreign page's request is refused even with the token.
    let foreign = [GOOD[0], ("origin", "https://evil.example")];
    assert_eq!(admin.call(Method::GET, "/admin/backends", &foreign, "").await.status, 403);
    let shown: Value = admin.call(Method::GET, "/admin/config", &GOOD, "").await.json();
    assert!(!shown.to_string().contains(DIGEST), "the configuration is shown without it");
    assert_eq!(Client::data(&gateway).post("/v1/completions", "{}").await.status, 200, "clients need none");
}
