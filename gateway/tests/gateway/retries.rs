//! Requests that a backend fails: which backend is asked next, what the client receives, and what is counted.

use http::Method;
use http_body_util::BodyExt;

use crate::support::{
    Answer, Client, Fleet, Mock, all_succeed, canned, eventually, fleet, metric, metrics, next_frame, settled, several,
    start, start_bare,
};

const CHAT: &str = "/v1/chat/completions";

async fn retries(gateway: &semmoe_gateway::Running, cause: &str, outcome: &str) -> f64 {
    metric(gateway, &format!("semmoe_retries_total{{cause=\"{cause}\",outcome=\"{outcome}\"}}")).await
}

fn reported(answer: &Answer) -> (u16, &str, &str) {
    (answer.status, answer.header("x-semmoe-backend"), answer.header("x-semmoe-attempts"))
}

/// The backend asked first.
async fn first<'a>(a: &'a mut Mock, b: &'a mut Mock) -> (&'a mut Mock, &'a mut Mock) {
    let is_a = tokio::select! {
        _ = a.next() => true,
        _ = b.next() => false,
    };
    if is_a { (a, b) } else { (b, a) }
}

#[tokio::test]
async fn an_engine_that_cannot_serve_is_believed_and_another_one_asked() {
    for status in ["429", "502", "503", "504"] {
        let Fleet { mocks: [a, _b], gateway, client } = fleet("").await;
        a.behave(status);
        for _ in 0..4 {
            let answer = client.post(CHAT, "{}").await;
            assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-b"), "{answer:?}");
        }
        assert_eq!(retries(&gateway, &format!("status_{status}"), "answered").await, 2.0);
        settled(&gateway).await;
    }
}

/// A 500 is tried elsewhere if configured, and counts against the backend that sent it.
#[tokio::test]
async fn a_500_is_retried_where_it_is_configured() {
    let Fleet { mocks: [mut a, _b], gateway, client } = fleet("[retry]\nstatuses = [500]\n").await;
    a.behave("500");
    for _ in 0..40 {
        let answer = client.post(CHAT, "{}").await;
        assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-b"), "{answer:?}");
    }
    assert_eq!(retries(&gateway, "status_500", "answered").await, 10.0);
    assert_eq!(std::iter::from_fn(|| a.seen.try_recv().ok()).count(), 10, "then its breaker is open");
    settled(&gateway).await;
}

/// An engine would answer the request identically again.
#[tokio::test]
async fn other_errors_are_relayed_and_evict_nobody() {
    let Fleet { mocks: [_a, _b], gateway, client } = fleet("").await;
    for status in ["500", "400", "404", "422", "501"] {
        for _ in 0..4 {
            let answer = client.mock(CHAT, status, "{}").await;
            assert_eq!((answer.status.to_string().as_str(), answer.header("x-semmoe-attempts")), (status, ""));
            assert_eq!(answer.message(), "the engine's own words");
        }
    }
    assert!(gateway.health("pod-a").unwrap().is_healthy() && gateway.health("pod-b").unwrap().is_healthy());
    settled(&gateway).await;
}

#[tokio::test]
async fn the_engines_own_answer_is_relayed_where_nobody_can_do_better() {
    let Fleet { mocks: [a, b], gateway, client } = fleet("").await;
    a.behave("503");
    b.behave("429");
    let mut seen = [client.post(CHAT, "{}").await, client.post(CHAT, "{}").await];
    seen.sort_by_key(|answer| answer.status);
    assert_eq!([reported(&seen[0]), reported(&seen[1])], [(429, "pod-b", "2"), (503, "pod-a", "2")]);
    assert!(seen.iter().all(|answer| answer.message() == "the engine's own words"));
    for (cause, outcome) in
        [("status_503", "failed"), ("status_503", "no_backend"), ("status_429", "failed"), ("status_429", "no_backend")]
    {
        assert_eq!(retries(&gateway, cause, outcome).await, 1.0, "{cause} {outcome}");
    }
    settled(&gateway).await;
}

/// The client has received nothing, so it cannot notice that a generation began twice.
#[tokio::test]
async fn a_connection_that_broke_before_the_answer_is_retried_elsewhere() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("").await;
    a.behave("hang");
    b.behave("hang");
    let call = client.begin(CHAT, "{}");
    let (broken, other) = first(&mut a, &mut b).await;
    other.behave("");
    broken.kill();
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.header("x-semmoe-attempts")), (200, "2"));
    assert_eq!(retries(&gateway, "broke", "answered").await, 1.0);
    settled(&gateway).await;
}

#[tokio::test]
async fn a_request_that_may_have_run_is_not_sent_twice_where_that_is_forbidden() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("[retry]\nafter_send = false\n").await;
    let call = client.begin_with(CHAT, "hang", "{}");
    let (broken, other) = first(&mut a, &mut b).await;
    broken.kill();
    let answer = call.await.unwrap();
    assert_eq!(answer.status, 502);
    assert!(answer.message().contains("broke off: "), "{}", answer.message());
    assert!(other.seen.try_recv().is_err() && broken.seen.try_recv().is_err());
    settled(&gateway).await;
}

/// Probes fail while a request waits for its answer, as those of a frozen engine do: it is moved.
#[tokio::test]
async fn a_request_leaves_a_backend_that_falls_ill() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("").await;
    a.behave("hang");
    b.behave("hang");
    let call = client.begin(CHAT, "{}");
    let (ill, other) = first(&mut a, &mut b).await;
    other.behave("");
    ill.settings().health = 503;
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.header("x-semmoe-attempts")), (200, "2"));
    ill.next_gone().await;
    assert_eq!(retries(&gateway, "ill", "answered").await, 1.0);
    settled(&gateway).await;
}

/// Without another backend, the request keeps waiting for an unhealthy one: probes of a busy engine fail too.
#[tokio::test]
async fn a_request_stays_with_an_ill_backend_that_is_alone() {
    let mut mock = canned(2);
    let gateway = start(&several(&[&mock])).await;
    let mut answer = tokio::spawn({
        let client = Client::data(&gateway);
        async move { client.open(Method::POST, CHAT, &[("x-mock", "late")], "{}").await }
    });
    mock.next().await;
    mock.settings().health = 503;
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    // Longer than the interval at which the gateway checks the backend's health.
    assert!(tokio::time::timeout(std::time::Duration::from_millis(600), &mut answer).await.is_err());
    mock.release(1);
    let answer = answer.await.unwrap();
    assert_eq!(answer.status(), 200);
    drop(answer.collect().await.unwrap());
    settled(&gateway).await;
}

/// A request that waited for the whole limit would wait as long again.
#[tokio::test]
async fn a_slow_answer_is_not_retried() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("[timeouts]\nfirst_byte_seconds = 0.2\n").await;
    let answer = client.mock(CHAT, "hang", "{}").await;
    assert_eq!(answer.status, 504);
    assert!(answer.message().contains("did not send the response head within 200ms"), "{}", answer.message());
    let (_, other) = first(&mut a, &mut b).await;
    assert!(other.seen.try_recv().is_err());
    settled(&gateway).await;
}

#[tokio::test]
async fn the_last_error_tells_how_many_were_asked_and_why_no_more() {
    let mut mocks = [canned(2), canned(2), canned(2)];
    let all = several(&mocks.each_ref());
    // The prober must not be faster than the requests.
    let health = "[health]\ninterval_seconds = 3600\nunhealthy_after = 1000\n";
    let cases = [
        ("attempts = 1", "attempts: 1; no attempts left"),
        ("attempts = 2", "attempts: 2; no attempts left"),
        ("attempts = 9", "attempts: 3; no other backend can serve"),
        ("attempts = 9\nbudget_ratio = 0\nbudget_per_second = 0.1", "attempts: 2; the retry budget is exhausted"),
    ];
    let mut gateways = Vec::new();
    for (retry, end) in cases {
        gateways.push((start_bare(&format!("{health}[retry]\n{retry}\n{all}")).await, end));
    }
    for mock in &mut mocks {
        mock.behave("hang");
    }
    for (gateway, end) in gateways {
        let client = Client::data(&gateway);
        let mut call = client.begin(CHAT, "{}");
        // Each engine that receives the request breaks off.
        let answer = loop {
            let [a, b, c] = &mut mocks;
            let asked = tokio::select! {
                answer = &mut call => break answer.unwrap(),
                _ = a.next() => a,
                _ = b.next() => b,
                _ = c.next() => c,
            };
            asked.kill();
            asked.listen();
        };
        assert_eq!(answer.status, 502, "{end}");
        assert!(answer.message().ends_with(&format!("({end})")), "{}", answer.message());
        settled(&gateway).await;
    }
}

/// A stream that has begun is never restarted, whatever happens.
#[tokio::test]
async fn what_was_relayed_is_never_retried() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("").await;
    let mut answer = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    a.release(1);
    b.release(1);
    assert_eq!(next_frame(&mut answer).await.as_deref(), Some("data: 1\n\n"));
    let (broken, other) = first(&mut a, &mut b).await;
    broken.kill();
    let rest = next_frame(&mut answer).await.unwrap();
    assert!(rest.starts_with("data: {\"error\":{\"message\":\"backend 'pod-"), "{rest}");
    assert_eq!(next_frame(&mut answer).await, None);
    assert!(other.seen.try_recv().is_err());
    settled(&gateway).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_a_retry_is_counted() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("").await;
    a.behave("hang");
    b.behave("hang");
    let call = client.begin(CHAT, "{}");
    let (broken, other) = first(&mut a, &mut b).await;
    broken.kill();
    other.next().await;
    call.abort();
    other.next_gone().await;
    settled(&gateway).await;
    eventually("the retry is counted", async || retries(&gateway, "broke", "unfinished").await >= 1.0).await;
}

/// However all backends fail, retries stay within their budget: successful requests pay for some, while failing ones
/// and retries do not pay twice.
#[tokio::test]
async fn a_failing_fleet_gets_no_more_retries_than_its_budget() {
    const FAILING: usize = 1000;
    for (status, backends, good, at_once) in [
        ("504", 2, 0, 1),
        ("504", 3, 0, 16),
        ("503", 3, 0, 1),
        ("overloaded", 2, 0, 16),
        ("overloaded", 3, 2_000, 16),
        ("504", 2, 2_000, 16),
    ] {
        let mocks: Vec<Mock> = (0..backends).map(|_| canned(2)).collect();
        let mocks: Vec<&Mock> = mocks.iter().collect();
        let began = std::time::Instant::now();
        // Only the budget bounds retries: no breaker opens.
        let gateway = start(&format!("[breaker]\nfailures = 0\n{}", several(&mocks))).await;
        let client = Client::data(&gateway);
        client.post_many(CHAT, good, 16).await;
        mocks.iter().for_each(|mock| mock.behave(status));
        client.post_many(CHAT, FAILING, at_once).await;
        let page = metrics(&gateway).await;
        let made: f64 = page
            .lines()
            .filter(|line| line.starts_with("semmoe_retries_total"))
            .filter(|line| ["answered", "failed", "unfinished"].iter().any(|outcome| line.contains(outcome)))
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum();
        // The window of ten seconds, plus those elapsed since it began.
        let seconds = 10.0 + began.elapsed().as_secs_f64();
        let most = 0.2 * (good + FAILING) as f64 + 10.0 * seconds;
        assert!(made <= most, "{status}, {backends} backends, {good} good, {at_once} at once: {made} of {most}");
        assert!(made > 0.0);
        settled(&gateway).await;
    }
}

/// A request that kills engines must not go through the whole fleet.
#[tokio::test]
async fn a_request_that_two_engines_died_with_is_sent_to_no_third() {
    let Fleet { mut mocks, gateway, client } = fleet("").await;
    for mock in &mut mocks {
        mock.behave("hang");
    }
    let mut call = client.begin(CHAT, "{}");
    let answer = loop {
        let [a, b, c] = &mut mocks;
        let killer = tokio::select! {
            answer = &mut call => break answer.unwrap(),
            _ = a.next() => a,
            _ = b.next() => b,
            _ = c.next() => c,
        };
        killer.kill();
    };
    assert_eq!((answer.status, answer.header("x-should-retry")), (502, "false"), "{answer:?}");
    assert_eq!(answer.json()["error"]["code"], "request_suspect");
    assert!(mocks.iter_mut().all(|mock| mock.seen.try_recv().is_err()));
    assert_eq!(retries(&gateway, "broke", "suspect").await, 1.0);
    settled(&gateway).await;
}

/// An engine that dies on its own takes many requests with it, and none of them is to blame.
#[tokio::test]
async fn requests_of_an_engine_that_dies_under_load_all_go_elsewhere() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("").await;
    a.behave("hang");
    b.behave("");
    let calls: Vec<_> = (0..64).map(|_| client.begin(CHAT, "{}")).collect();
    for _ in 0..32 {
        a.next().await;
    }
    a.kill();
    all_succeed(calls).await;
    b.next().await;
    settled(&gateway).await;
}
