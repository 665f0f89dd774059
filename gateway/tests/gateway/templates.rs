//! Chat templates that are unusable or too expensive: their model's chats are routed by load, and nothing else is
//! affected.

use std::path::PathBuf;

use serde_json::json;

use crate::support::files::{File, reload};
use crate::support::{Client, Fixture, Mock, canned, metric, metrics};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const FAILURES: &str = "semmoe_score_failures_total";

async fn failures(gateway: &semmoe_gateway::Running, reason: &str) -> f64 {
    metric(gateway, &format!("{FAILURES}{{reason=\"{reason}\"}}")).await
}

/// A model whose chat template is the file at `path`, not written yet, and its configuration.
struct Model {
    mock: Mock,
    /// Owns the files.
    fixture: Fixture,
    text: String,
    path: PathBuf,
}

impl Model {
    fn new() -> Self {
        let (mock, fixture) = (canned(2), Fixture::new(2));
        mock.settings().info = Some(fixture.info());
        let tables = fixture.write("t", &["alpha", "beta"], 0);
        let path = tables.with_file_name("template.jinja");
        let text = fixture.affinity(&mock.url(), &tables);
        let key = format!("chat_template = \"{}\"\n[[models.b", path.display());
        Self { text: text.replace("[[models.b", &key), mock, fixture, path }
    }
}

#[tokio::test]
async fn an_unusable_template_costs_the_affinity_of_chats() {
    let Model { mut mock, fixture: _fixture, text, path } = Model::new();
    let chain = format!("{{{{ x{} }}}}", ".a".repeat(10_000));
    std::fs::write(&path, &chain).unwrap();
    let file = File::new("", &text);
    let gateway = file.start().await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    let chat = json!({"messages": [{"role": "user", "content": "alpha"}]}).to_string();

    assert_eq!(client.post(CHAT, chat.clone()).await.status, 200);
    mock.next().await;
    assert_eq!(failures(&gateway, "template_unreadable").await, 1.0);
    assert!(metrics(&gateway).await.contains("semmoe_chat_template_unreadable{model=\"tiny\"} 1"));
    let ready = admin.get("/readyz").await;
    assert_eq!(ready.status, 200);
    assert!(String::from_utf8_lossy(&ready.body).contains("model 'tiny': its chat template cannot be used: "));
    // Prompts that need no template are scored.
    assert_eq!(client.post(COMPLETIONS, r#"{"prompt":"alpha"}"#).await.status, 200);
    mock.next().await;
    assert_eq!(failures(&gateway, "template_unreadable").await, 1.0);

    // A reload adopts a good template, which stays in use when the file is damaged again.
    std::fs::write(&path, "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
        .unwrap();
    assert_eq!(reload(&gateway).await.status, 200);
    assert!(metrics(&gateway).await.contains("semmoe_chat_template_unreadable{model=\"tiny\"} 0"));
    std::fs::write(&path, chain + " ").unwrap();
    assert_eq!(reload(&gateway).await.status, 200);
    assert!(metrics(&gateway).await.contains("semmoe_chat_template_unreadable{model=\"tiny\"} 1"));
    assert_eq!(client.post(CHAT, chat).await.status, 200);
    mock.next().await;
    assert_eq!(failures(&gateway, "template_unreadable").await, 1.0);
}

#[tokio::test]
async fn a_template_that_does_not_end_is_stopped() {
    let Model { mut mock, fixture: _fixture, text, path } = Model::new();
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    let source = format!("{{% if messages[0].content == 'alpha' %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}");
    std::fs::write(&path, source).unwrap();
    let file = File::new("", &format!("[routing]\nscore_limit_seconds = 600\n{text}"));
    let gateway = file.start().await;
    let client = Client::data(&gateway);
    for content in ["alpha", "beta"] {
        let chat = json!({"messages": [{"role": "user", "content": content}]}).to_string();
        assert_eq!(client.post(CHAT, chat).await.status, 200);
        mock.next().await;
    }
    assert_eq!(failures(&gateway, "template_budget").await, 1.0);
}

#[tokio::test]
async fn variables_of_the_configuration_are_the_templates() {
    let Model { mut mock, fixture: _fixture, text, path } = Model::new();
    std::fs::write(&path, "{% if site != 'Ulm' %}{{ raise_exception('no') }}{% endif %}alpha").unwrap();
    let file = File::new("", &text);
    let gateway = file.start().await;
    let client = Client::data(&gateway);
    let messages = json!([{"role": "user", "content": "alpha"}]);
    let plain = json!({"messages": messages}).to_string();
    let with = |site: &str| json!({"messages": messages, "chat_template_kwargs": {"site": site}}).to_string();
    let send = async |mock: &mut Mock, body| {
        assert_eq!(client.post(CHAT, body).await.status, 200);
        mock.next().await;
        failures(&gateway, "template").await
    };
    assert_eq!(send(&mut mock, with("Ulm")).await, 0.0);
    assert_eq!(send(&mut mock, plain.clone()).await, 1.0);
    let keys = "chat_template_kwargs = { site = \"Ulm\" }\nchat_template =";
    file.write("", &text.replace("chat_template =", keys));
    assert_eq!(reload(&gateway).await.status, 200);
    assert_eq!(send(&mut mock, plain).await, 1.0);
    // The request's own take precedence.
    assert_eq!(send(&mut mock, with("Bonn")).await, 2.0);
}
