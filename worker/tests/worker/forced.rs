//! A forced local rate: counts and traffic follow it, and nothing else may determine where experts are.

use semmoe_tables::Attention;
use semmoe_worker::{ExpertLayout, ForcedRate, WorkerConfig};
use serde_json::json;

use crate::support::{Unit, golden, greedy, refused, refused_unit};

fn forced(rate: f64) -> impl Fn(&mut WorkerConfig) {
    move |config| config.force_local_rate = ForcedRate::new(rate)
}

#[tokio::test]
async fn rows_go_where_the_rate_says() {
    for rate in [0.0, 0.4, 1.0] {
        let unit = Unit::start_with(2, forced(rate));
        for (at, golden) in golden().iter().enumerate() {
            unit.ok("/generate", &greedy(&golden["input_ids"], 8 + at as u32)).await;
        }
        let metrics = unit.metrics().await;
        let pairs = |place| metrics.sum("semmoe_activations_total", &[("where", place)]) as f64;
        let (local, remote) = (pairs("local"), pairs("remote"));
        let deviation = 5.0 * (rate * (1.0 - rate) / (local + remote)).sqrt();
        assert!((local / (local + remote) - rate).abs() <= deviation, "{rate}: {local} of {}", local + remote);
        assert_eq!(metrics.sum("semmoe_dispatch_bytes_total", &[("where", "remote")]) > 0, rate < 1.0);
        let page = "/metrics?name[]=semmoe_tokens_total&name[]=semmoe_steps_total";
        let page = unit.client.get_text(&unit.url, page, &Default::default()).await.unwrap();
        assert!(
            page.contains("# TYPE semmoe_steps_total counter\n") && page.contains("\nsemmoe_tokens_total{"),
            "{page}"
        );
        assert!(!page.contains("seconds"), "{page}");
        let info = unit.get("/server_info").await;
        assert_eq!(info["force_local_rate"], json!(rate));
        let (status, _, answer) = unit.ask("/switch", &json!({"to": "dp-tp"})).await;
        assert!(status == 400 && answer.to_string().contains("--force-local-rate"), "{status}: {answer}");
        unit.end();
    }
}

#[test]
fn what_else_says_where_experts_are_is_refused() {
    type Adjust = fn(&mut WorkerConfig);
    let refusals: [(&str, Adjust); 6] = [
        ("tables", |config| config.tables = Some("x.safetensors".into())),
        ("attention other than dp", |config| config.attention = Attention::Tp),
        ("attention other than dp", |config| config.both_attentions = true),
        ("experts other than ep", |config| config.experts = ExpertLayout::Tp),
        ("expert domains", |config| config.domains = 2.into()),
        ("streamed experts", |config| config.expert_memory = Some(1 << 30)),
    ];
    for (says, adjust) in refusals {
        let message = refused(2, |config| {
            forced(0.4)(config);
            adjust(config);
        });
        assert_eq!(message, format!("--force-local-rate 0.4 cannot be combined with {says}"));
    }
    for (world, says) in [(1, "a single rank"), (16, "fewer experts on a rank than top-k")] {
        assert!(refused(world, forced(0.4)).ends_with(says), "{world}");
    }
    let errors = refused_unit(2, |config| forced(0.1 + 0.2 * f64::from(config.rank))(config));
    assert!(errors[0].0.contains("a forced local rate of 0.1"), "{errors:?}");
}
