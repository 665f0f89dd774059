//! Errors that keep a gateway from starting: one sentence that names the key, the file or the backend.

use std::path::Path;

use semmoe_gateway::{Config, Gateway};
use serde_json::json;

use crate::support::{Fixture, canned, config, plain_model};

const MODEL: &str = "[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n";
const BACKEND: &str = "[[models.backends]]\nname = \"a\"\nengine = \"sglang\"\nurl = \"http://127.0.0.1:1\"\n";

/// `head` followed by a valid model.
fn with(head: &str) -> String {
    format!("{head}\n{MODEL}{BACKEND}")
}

/// A model with this policy and further keys.
fn policy(name: &str, more: &str) -> String {
    format!("{}{more}{BACKEND}", MODEL.replace("round_robin", name))
}

/// A model with further keys.
fn model(more: &str) -> String {
    policy("round_robin", more)
}

/// A model of a backend that has `to` in place of `from`, and further keys.
fn backend(from: &str, to: &str, more: &str) -> String {
    assert!(BACKEND.contains(from));
    format!("{MODEL}{}{more}", BACKEND.replace(from, to))
}

/// The error is one sentence that contains this; returns it.
#[track_caller]
fn refused(text: &str, says: &str) -> String {
    let error = Config::from_toml(text, Path::new("")).unwrap_err().to_string();
    assert!(error.contains(says) && !error.contains('\n'), "expected '{says}' in '{error}' for\n{text}");
    error
}

#[test]
fn configuration_errors_name_the_key() {
    for (text, says) in [
        (String::new(), "models: empty"),
        (MODEL.to_owned(), "models[0].backends: empty"),
        (with("[server]\nlisten = \"x\""), "server.listen: 'x' is not an address"),
        (with("[server]\nlistne = \"x\""), "line 2: unknown field `listne`"),
        (with("[sever]"), "line 1: unknown field `sever`"),
        (with("[server]\nlisten = \"127.0.0.1:65535\""), "server.admin: must be set"),
        (with("[server]\nadmin = \"0.0.0.0:9\""), "server.admin_token_sha256 must be set"),
        (with("[server]\nadmin_token_sha256 = \"secret\""), "server.admin_token_sha256: not 64 hexadecimal digits"),
        (with("[server]\nadmin = \"127.0.0.1:8080\""), "server.admin: 127.0.0.1:8080 is already used by server.listen"),
        (with("[limits]\nbody_bytes = 0"), "limits.body_bytes: 0, expected at least 1"),
        (with("[limits]\nbody_bytes = -1"), "line 2: "),
        (with("[timeouts]\nidle_seconds = 0.0"), "timeouts.idle_seconds: 0"),
        (with("[timeouts]\nidle_seconds = nan"), "timeouts.idle_seconds: NaN"),
        (with("[timeouts]\nidle_seconds = 1e300"), "timeouts.idle_seconds: "),
        (with("[health]\nunhealthy_after = 0"), "health.unhealthy_after: 0"),
        (with("[routing.settings]\nload_margin = -1.0"), "routing.settings: "),
        (with("[sampling]\nshare = 1.5"), "sampling.share: 1.5, expected 0 to 1"),
        (with("[sampling]\nshare = nan"), "sampling.share: NaN"),
        (with("[sampling]\ndrift_clear = 0.06"), "sampling.drift_clear: 0.06, expected 0 to 0.05"),
        (with("[sampling]\ndrift_samples = 0"), "sampling.drift_samples: 0"),
        (with("[sampling]\nprofile_entries = 9"), "sampling.profile_entries: 9, expected at least 1000"),
        (with("[sampling]\nprofile_interval_seconds = 0.0"), "sampling.profile_interval_seconds: 0"),
        (with("[sampling]\ntrace_files = 0"), "sampling.trace_files: 0, expected at least 1"),
        (with("[sampling]\nrate = 1"), "line 2: unknown field `rate`"),
        (with("[routing]\nx = 1"), "line 2: unknown field `x`"),
        (
            policy("afinity", ""),
            "models[0].policy: unknown policy `afinity`, expected one of: affinity, affinity_paper, round_robin, ",
        ),
        (policy("affinity", ""), "models[0].tokenizer: must be set"),
        (policy("affinity", "tokenizer = \"t\"\n"), "models[0].backends[0].tables: must be set"),
        (policy("affinity", "tokenizer = \"t\"\n").replace("sglang", "openai"), "models[0].backends[0].engine: "),
        (backend("sglang", "trt", ""), "engine: unknown engine 'trt' (known: sglang, semmoe, vllm, openai)"),
        (backend("http:", "ftp:", ""), "models[0].backends[0].url: "),
        (with("") + "ranks = 0\n", "models[0].backends[0].ranks: 0"),
        (with("") + "rank = 1\n", "unknown field `rank`"),
        (format!("{MODEL}{BACKEND}{BACKEND}"), "models[0].backends[1].name: 'a' is already taken"),
        (model("aliases = [\"m\"]\n"), "models[0].aliases[0]: 'm' is already taken"),
        (with("") + &backend("\"a\"", "\"b\"", ""), "models[1].name: 'm' is already taken"),
        (format!("{}{BACKEND}", MODEL.replace("\"m\"", "\"\"")), "models[0].name: \"\" is not a name"),
        (model("adapters = [\"a\", \"a\"]\n"), "models[0].adapters[1]: 'm:a' is already taken"),
        (model("adapters = [\"\"]\n"), "models[0].adapters[0]: empty"),
        ("x = ".to_owned(), "line 1: "),
    ] {
        refused(&text, says);
    }
    let config = Config::from_toml(&with(""), Path::new("")).unwrap();
    assert_eq!(config.addresses().1.to_string(), "127.0.0.1:8081");
    let error = Config::load(Path::new("/no/such.toml")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read the configuration /no/such.toml: "), "{error}");
}

/// Policies, their baseline and canary, and their inputs.
#[test]
fn configuration_errors_of_policies_name_the_key() {
    for (text, says) in [
        (with("[routing]\nsticky_header = \"a b\""), "routing.sticky_header: \"a b\" is not a valid header name"),
        (with("[routing.prefix]\nblock_tokens = 0"), "routing.prefix: routing setting `block_tokens` is 0"),
        (with("[routing.prefix]\nblocks = 1"), "line 2: unknown field `blocks`"),
        (model("canary = 101\n"), "models[0].canary: 101, expected 0 to 100 percent"),
        (model("canary = -1\n"), "line 4: "),
        (model("canary = 10\nbaseline = \"round_robin\"\n"), "canary: policy and baseline are both 'round_robin'"),
        (model("canary = 10\nbaseline = \"shadow\"\n"), "baseline: policy `shadow` cannot be its own `baseline`"),
        (
            model("canary = 10\nbaseline = \"leastload\"\n"),
            "models[0].baseline: unknown policy `leastload`, expected one of: affinity, ",
        ),
        (policy("shadow", "canary = 10\n"), "models[0].canary: policy 'shadow' places no requests itself"),
        (model("baseline = \"random\"\n"), "models[0].baseline: 'random' would never be used"),
        (policy("shadow", ""), "models[0].tokenizer: must be set"),
        (policy("shadow", "baseline = \"shadow\"\n"), "policy: policy `shadow` cannot be its own `baseline`"),
        (policy("prefix", ""), "models[0].tokenizer: must be set, because policy 'prefix' reads prompts"),
    ] {
        refused(&text, says);
    }
    for more in ["canary = 0\n", "canary = 100\nbaseline = \"power_of_two\"\n"] {
        Config::from_toml(&model(more), Path::new("")).unwrap();
    }
}

#[test]
fn configuration_errors_of_keys_name_the_key_and_repeat_no_digest() {
    let (one, other) = ("a".repeat(64), "b".repeat(64));
    let keys = |second: &str| {
        format!("{MODEL}{BACKEND}[[auth.keys]]\nname = \"a\"\nsha256 = \"{one}\"\n[[auth.keys]]\n{second}\n")
    };
    for (text, says) in [
        (
            with("[auth]\nkeys = [{ name = \"a\", sha256 = \"my-secret\" }]"),
            "auth.keys[0].sha256: not 64 hexadecimal digits",
        ),
        (with("[auth]\nkeys = [{ name = \"a\" }]"), "missing field `sha256`"),
        (with("[auth]\nforward = \"drop\""), "line 2: "),
        (
            with("[auth]\nforward = \"strip\"\n[routing]\nsticky_header = \"authorization\""),
            "routing.sticky_header: 'authorization' is removed from requests",
        ),
    ] {
        assert!(!refused(&text, says).contains("my-secret"), "{text}");
    }
    for (second, says) in [
        (format!("name = \"a\"\nsha256 = \"{other}\""), "auth.keys[1].name: 'a' is already taken"),
        (format!("name = \"b\"\nsha256 = \"{one}\""), "auth.keys[1].sha256: the same digest as another key's"),
        (format!("name = \"b\"\nsha256 = \"{other}\"\nmodels = [\"x\"]"), "auth.keys[1].models: there is no model 'x'"),
        (format!("name = \"b\"\nsha256 = \"{other}\"\nmodels = []"), "auth.keys[1].models: empty"),
    ] {
        assert!(!refused(&keys(&second), says).contains(&one), "{second}");
    }
    let good = Config::from_toml(&keys(&format!("name = \"b\"\nsha256 = \"{other}\"")), Path::new("")).unwrap();
    assert!(!format!("{good:?}").contains(&other[..8]), "not even in debug output");
}

/// Several URLs, and settings that only an operator knows.
#[test]
fn configuration_errors_of_backends_name_the_key() {
    let url = "url = \"http://127.0.0.1:1\"";
    let (two, same) = ("urls = [\"http://a\", \"http://b\"]", "urls = [\"http://a\", \"http://a\"]");
    for (text, says) in [
        (with("") + "urls = [\"http://a\"]\n", "models[0].backends[0].urls: `url` is set too"),
        (backend(url, two, ""), "models[0].backends[0].urls: sglang serves all of its ranks at one URL"),
        (backend(url, same, "").replace("sglang", "vllm"), "models[0].backends[0].urls[1]: duplicate URL http://a"),
        (
            backend(url, two, "ranks = 3\n").replace("sglang", "openai"),
            "models[0].backends[0].ranks: 3, but there are 2 URLs",
        ),
        (backend(url, "", ""), "models[0].backends[0].url: "),
        (with("") + "placement_digest = \"beef\"\n", "models[0].backends[0].placement_digest: not 64"),
        (with("") + "rank_base = \"local\"\n", "models[0].backends[0].rank_base: only supported by vllm"),
        (with("") + "rank_base = \"node\"\n", "unknown variant `node`"),
    ] {
        refused(&text, says);
    }
}

async fn start_error(toml: &str) -> String {
    let error = Gateway::start(config(toml)).await.unwrap_err().to_string();
    assert!(!error.contains('\n'), "one sentence: {error}");
    error
}

#[tokio::test]
async fn files_that_cannot_be_used_are_reported() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &[], 0);
    let good = fixture.affinity("http://127.0.0.1:1", &tables);
    assert!(Gateway::check(&config(&good)).await.is_ok());
    let error = start_error(&format!("[sampling]\nprofile_dir = \"/no/such\"\n{good}")).await;
    assert_eq!(error, "sampling.profile_dir: /no/such is not a directory");
    let checked = Gateway::check(&config(&format!("[sampling]\nprofile_dir = \"/no/such\"\n{good}"))).await;
    assert_eq!(checked.unwrap_err().to_string(), error);
}

#[tokio::test]
async fn a_backend_that_does_not_fit_its_tables_is_reported_with_what_does_not_fit() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &[], 0);
    let mock = canned(2);
    let toml = fixture.affinity(&mock.url(), &tables);
    for (field, value, says) in [
        ("placement_digest", json!("beef"), "but the backend runs placement beef"),
        ("tokenizer_sha256", json!("beef"), "the backend's tokenizer has SHA-256 beef"),
        ("dp_size", json!(4), "the backend has 4 attention-DP ranks, but the tables have 2"),
        ("enable_eplb", json!(true), "EPLB"),
        ("model_path", json!("/models/other"), "model"),
        ("num_experts", json!(64), "num_experts"),
    ] {
        let mut info = fixture.info();
        info[field] = value;
        mock.settings().info = Some(info);
        let said = Gateway::probe(config(&toml)).await.unwrap().troubles.to_string();
        assert!(said.starts_with("backend 'pod-a': ") && said.contains(says), "expected '{says}' in '{said}'");
        let gateway = Gateway::start(config(&toml)).await.unwrap();
        assert!(gateway.health("pod-a").unwrap().is_healthy(), "{says}");
        assert_eq!(gateway.health("pod-z"), None);
    }
}

#[tokio::test]
async fn a_taken_port_is_reported() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let mock = canned(1);
    let text = format!("[server]\nlisten = \"{address}\"\nadmin = \"127.0.0.1:0\"\n{}", plain_model(&mock, 1));
    let config = Config::from_toml(&text, Path::new("")).unwrap();
    let error = Gateway::start(config).await.unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot listen on {address} for requests: ")), "{error}");
}

/// Connections while engines are probed or tokenizers are read are refused at once instead of waiting.
#[tokio::test]
async fn connections_are_refused_until_there_is_somebody_to_answer() {
    let mock = canned(1);
    mock.settings().mute = true;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    drop(taken);
    let health = "[health]\ntimeout_seconds = 1\nbusy_seconds = 1\n";
    let text = format!("[server]\nlisten = \"{address}\"\nadmin = \"127.0.0.1:0\"\n{health}{}", plain_model(&mock, 1));
    let starting = tokio::spawn(Gateway::start(Config::from_toml(&text, Path::new("")).unwrap()));
    for _ in 0..20 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        assert!(!starting.is_finished(), "the engine does not answer");
        let error = tokio::net::TcpStream::connect(address).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    }
    mock.settings().mute = false;
    let gateway = starting.await.unwrap().unwrap();
    tokio::net::TcpStream::connect(gateway.data_addr()).await.unwrap();
}
