//! The admin plane conforms to its OpenAPI document: every route, every answer, every failure.

use http::Method;
use semmoe_gateway::Running;
use serde_json::{Value, json};

use crate::support::{Answer, Client, Fixture, Mock, TEXTS, canned, check_schema, reloadable};

/// A gateway with content for every answer: earlier tables, an error, a shadow, requests.
async fn gateway(mock: &Mock, fixture: &Fixture) -> Running {
    let gateway = reloadable(mock, fixture, "[sampling]\nshare = 0.5").await;
    let (admin, data) = (Client::admin(&gateway), Client::data(&gateway));
    fixture.write("second", &TEXTS, 1);
    for (path, status) in [("second", 200), ("missing", 422)] {
        let command = json!({ "backend": "pod-a", "path": path }).to_string();
        assert_eq!(admin.post("/admin/tables", command).await.status, status);
    }
    assert_eq!(data.post("/generate", json!({ "text": TEXTS[0] }).to_string()).await.status, 200);
    gateway
}

/// A valid body for every POST route.
fn body_for(path: &str) -> Value {
    match path {
        "/admin/tables" => json!({ "backend": "pod-a", "path": "second" }),
        "/admin/tables/rollback" => json!({ "backend": "pod-a" }),
        "/admin/switch" => json!({ "backend": "pod-a", "to": "ep" }),
        _ => Value::Null,
    }
}

/// The schema of an answer with this status.
fn schema<'a>(document: &'a Value, operation: &'a Value, answer: &Answer) -> &'a Value {
    let mut response = &operation["responses"][if answer.status == 200 { "200" } else { "default" }];
    if let Some(place) = response["$ref"].as_str() {
        response = document.pointer(&place[1..]).unwrap();
    }
    let kind = answer.header("content-type").split(';').next().unwrap();
    let content = &response["content"][kind];
    assert!(content.is_object(), "no {kind} in {response}");
    &content["schema"]
}

fn check(document: &Value, operation: &Value, answer: &Answer, at: &str) {
    let schema = schema(document, operation, answer);
    let value = if schema["type"] == "string" { Value::String(answer.text()) } else { answer.json() };
    check_schema(document, schema, &value, at);
}

async fn document(gateway: &Running) -> Value {
    let answer = Client::admin(gateway).get("/admin/openapi.json").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

fn operations(document: &Value) -> Vec<(String, Method, Value)> {
    let mut all = Vec::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            all.push((path.clone(), method.to_uppercase().parse().unwrap(), operation.clone()));
        }
    }
    all
}

#[tokio::test]
async fn every_route_answers_as_the_document_says() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = gateway(&mock, &fixture).await;
    let client = Client::admin(&gateway);
    let document = document(&gateway).await;
    assert_eq!(document["openapi"], "3.1.0");
    let operations = operations(&document);
    for (path, method, operation) in &operations {
        let at = format!("{method} {path}");
        let body = body_for(path);
        if operation["requestBody"].is_object() {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            check_schema(&document, schema, &body, &format!("body of {at}"));
        }
        let headers = [("content-type", "application/json")];
        let named = path.replace("{name}", "pod-a");
        let answer = client.call(method.clone(), &named, &headers, body.to_string()).await;
        // The mock does not answer like a switchable worker; tests/command/up.rs switches one.
        let expected = if at == "POST /admin/switch" { 502 } else { 200 };
        assert_eq!(answer.status, expected, "{at}: {answer:?}");
        check(&document, operation, &answer, &at);
        // Failures conform to the document too.
        if operation["requestBody"].is_object() {
            let answer = client.call(method.clone(), &named, &headers, "{}").await;
            assert_eq!(answer.status, 400, "{at}: {answer:?}");
            check(&document, operation, &answer, &at);
        }
    }
    let index = client.get("/").await.json();
    let listed: Vec<&String> = index["routes"].as_object().unwrap().keys().collect();
    let documented: Vec<String> = operations.iter().map(|(path, method, _)| format!("{method} {path}")).collect();
    let mut missing = listed.iter().filter(|listed| !documented.contains(listed));
    assert!(missing.next().is_none() && listed.len() == documented.len(), "{listed:?} {documented:?}");
}

/// A model with a shadow, a canary or a prefix table has more to show.
#[tokio::test]
async fn optional_parts_are_documented_too() {
    let mock = canned(2);
    for (policy, keys) in [("shadow", ""), ("affinity", "canary = 50\n"), ("prefix", "")] {
        let fixture = Fixture::new(2);
        mock.settings().info = Some(fixture.info());
        let tables = fixture.write("t", &TEXTS, 0);
        let toml = fixture.balanced(&mock.url(), &tables);
        let toml = toml.replace("name = \"tiny\"\n", &format!("name = \"tiny\"\npolicy = \"{policy}\"\n{keys}"));
        let gateway = crate::support::start(&toml).await;
        Client::data(&gateway).post("/generate", json!({ "text": TEXTS[0] }).to_string()).await;
        let answer = Client::admin(&gateway).get("/admin/routing").await;
        let shown = &answer.json()["models"][0];
        let parts = ["shadow", "canary", "prefix_table"].map(|part| shown[part].is_object());
        assert!(parts.contains(&true), "{shown}");
        let document = document(&gateway).await;
        check(&document, &document["paths"]["/admin/routing"]["get"], &answer, policy);
    }
}

/// Anything undocumented is rejected, whatever the method.
#[tokio::test]
async fn what_is_not_in_the_document_is_not_there() {
    let mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = gateway(&mock, &fixture).await;
    let document = document(&gateway).await;
    let client = Client::admin(&gateway);
    let methods = [Method::GET, Method::POST, Method::PUT, Method::DELETE, Method::PATCH];
    for (path, documented) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "pod-a");
        for method in methods.iter().filter(|method| documented[method.as_str().to_lowercase()].is_null()) {
            let answer = client.call(method.clone(), &path, &[], "").await;
            assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (405, Some("method_not_allowed")));
        }
    }
    for path in ["/admin", "/admin/", "/admin/tables/", "/admin/openapi", "/ui/"] {
        let answer = client.get(path).await;
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("route_not_found")), "{path}");
    }
}
