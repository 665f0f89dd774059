//! The queue: order, bounds, leaving, and that no room is lost.

use std::sync::atomic::AtomicI64;
use std::time::Duration;

use prometheus_client::metrics::histogram::exponential_buckets;
use proptest::prelude::*;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

fn queue() -> Arc<Queue> {
    Arc::new(Queue::new(Gauge::default(), Histogram::new(exponential_buckets(0.001, 2.0, 3))))
}

fn rules(max_queued: usize) -> QueueRules {
    QueueRules {
        max_in_flight: Some(1),
        max_queued,
        max_wait: PATIENCE,
        wait_for_backend: Duration::ZERO,
        priority_seconds: 0.0,
    }
}

/// Ranks with limited room.
struct Ranks(Vec<AtomicI64>);

impl Ranks {
    fn new(room: &[i64]) -> Arc<Self> {
        Arc::new(Self(room.iter().map(|room| AtomicI64::new(*room)).collect()))
    }

    /// Takes a rank among those in `wanted`.
    fn take(self: &Arc<Self>, queue: &Arc<Queue>, wanted: Option<usize>) -> Result<Held, Nowhere> {
        let free = |at: &usize| wanted.is_none_or(|wanted| wanted == *at) && self.0[*at].load(Ordering::SeqCst) > 0;
        let at = (0..self.0.len()).find(free).ok_or(Nowhere::Full)?;
        assert!(self.0[at].fetch_sub(1, Ordering::SeqCst) > 0, "a rank has more than its limit");
        Ok(Held { ranks: Arc::clone(self), at, queue: Arc::clone(queue) })
    }
}

struct Held {
    ranks: Arc<Ranks>,
    at: usize,
    queue: Arc<Queue>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ranks.0[self.at].fetch_add(1, Ordering::SeqCst);
        drop(Room::new(&self.queue));
    }
}

impl Queue {
    /// Whether no request waits, and none has left anything behind.
    pub(crate) fn is_at_rest(&self) -> bool {
        let line = self.lock();
        line.waiting.is_empty() && line.offers == 0 && self.looking.load(Ordering::SeqCst) == 0 && self.depth.get() == 0
    }
}

#[tokio::test]
async fn first_come_first_served() {
    let (queue, ranks) = (queue(), Ranks::new(&[1]));
    let held = queue.enter(&rules(10), 0, || ranks.take(&queue, None)).await.unwrap();
    let (sender, mut order) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    for number in 0..5 {
        let (queue, ranks, sender) = (Arc::clone(&queue), Arc::clone(&ranks), sender.clone());
        let depth = queue.depth.get();
        tasks.push(tokio::spawn({
            let queue = Arc::clone(&queue);
            async move {
                let held = queue.enter(&rules(10), 0, || ranks.take(&queue, None)).await.unwrap();
                sender.send(number).unwrap();
                drop(held);
            }
        }));
        while queue.depth.get() == depth {
            tokio::task::yield_now().await;
        }
    }
    drop(held);
    for expected in 0..5 {
        assert_eq!(order.recv().await, Some(expected));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(queue.is_at_rest());
}

#[tokio::test]
async fn the_line_has_a_bound_and_its_waits_an_end() {
    let (queue, ranks) = (queue(), Ranks::new(&[0]));
    let full = || ranks.take(&queue, None);
    let gone = || Err::<Held, _>(Nowhere::Gone);
    assert_eq!(queue.enter(&rules(0), 0, full).await.err(), Some(Refused::TooMany));
    assert_eq!(queue.enter(&rules(0), 0, gone).await.err(), Some(Refused::Gone));
    assert_eq!(queue.enter(&rules(1), 0, gone).await.err(), Some(Refused::Gone));
    let short = Duration::from_millis(5);
    let short = QueueRules { max_wait: short, wait_for_backend: short, ..rules(1) };
    assert_eq!(queue.enter(&short, 0, full).await.err(), Some(Refused::TooLong));
    assert_eq!(queue.enter(&short, 0, gone).await.err(), Some(Refused::Gone));
    assert!(queue.is_at_rest());
}

#[tokio::test]
async fn a_backend_that_comes_is_offered_to_all() {
    let (queue, ranks) = (queue(), Ranks::new(&[0]));
    let rules = QueueRules { wait_for_backend: PATIENCE, ..rules(10) };
    let mut tasks = Vec::new();
    for _ in 0..5 {
        let (queue, ranks) = (Arc::clone(&queue), Arc::clone(&ranks));
        tasks.push(tokio::spawn(async move {
            queue.enter(&rules, 0, || ranks.take(&queue, None).map_err(|_| Nowhere::Gone)).await.map(std::mem::forget)
        }));
    }
    while queue.depth.get() < 5 {
        tokio::task::yield_now().await;
    }
    ranks.0[0].store(5, Ordering::SeqCst);
    queue.wake_all();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert!(queue.is_at_rest());
}

/// A request that waits for a busy rank does not block those behind it from a free one.
#[tokio::test]
async fn nobody_waits_behind_one_who_cannot_go() {
    let (queue, ranks) = (queue(), Ranks::new(&[1, 1]));
    let enter = |wanted| {
        let (queue, ranks) = (Arc::clone(&queue), Arc::clone(&ranks));
        async move { queue.enter(&rules(10), 0, || ranks.take(&queue, wanted)).await }
    };
    let (first, second) = (enter(Some(0)).await.unwrap(), enter(Some(1)).await.unwrap());
    let pinned = tokio::spawn(enter(Some(0)));
    while queue.depth.get() < 1 {
        tokio::task::yield_now().await;
    }
    let behind = tokio::spawn(enter(None));
    while queue.depth.get() < 2 {
        tokio::task::yield_now().await;
    }
    drop(second);
    let behind = behind.await.unwrap().unwrap();
    assert_eq!(behind.at, 1);
    assert!(!pinned.is_finished());
    drop(first);
    assert_eq!(pinned.await.unwrap().unwrap().at, 0);
    drop(behind);
    assert!(queue.is_at_rest());
}

#[test]
fn a_priority_is_a_head_start_in_seconds() {
    let order = |step_seconds: f64| {
        let requests = [('a', 0, 0.0), ('b', 3, 0.0), ('c', 6, 1.0), ('d', 9, 2.0), ('e', 12, 0.0), ('f', 12, 0.0)];
        let places = requests.into_iter().zip(0..).map(|((name, seconds, priority), number)| {
            (Place::new(Duration::from_secs(seconds), step_seconds * priority, number), name)
        });
        places.collect::<BTreeMap<_, _>>().into_values().collect::<String>()
    };
    assert_eq!(order(0.0), "abcdef");
    // As if at 0, 3, 1, -1, 12 and 12 s.
    assert_eq!(order(5.0), "dacbef");
    assert_eq!(order(-5.0), "abcefd");
}

/// Urgent requests overtake those that wait, in the order in which they came.
#[tokio::test]
async fn higher_priorities_go_first() {
    let (queue, ranks) = (queue(), Ranks::new(&[1]));
    let rules = QueueRules { priority_seconds: 3600.0, ..rules(10) };
    let held = queue.enter(&rules, 0, || ranks.take(&queue, None)).await.unwrap();
    let (sender, mut served) = tokio::sync::mpsc::unbounded_channel();
    for (number, priority) in [0, 2, 1, 2, 0].into_iter().enumerate() {
        let (queue, ranks, sender) = (Arc::clone(&queue), Arc::clone(&ranks), sender.clone());
        let depth = queue.depth.get();
        tokio::spawn({
            let queue = Arc::clone(&queue);
            async move {
                let held = queue.enter(&rules, priority, || ranks.take(&queue, None)).await.unwrap();
                sender.send(number).unwrap();
                drop(held);
            }
        });
        while queue.depth.get() == depth {
            tokio::task::yield_now().await;
        }
    }
    drop((held, sender));
    let mut order = Vec::new();
    while let Some(number) = served.recv().await {
        order.push(number);
    }
    assert_eq!(order, [1, 3, 2, 0, 4]);
    assert!(queue.is_at_rest());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Requests for any rank or for a specific one, on several threads, some of which leave while queued or placed:
    /// none waits while there is room for it, no limit is exceeded, and nothing is left behind.
    #[test]
    fn no_room_is_lost(
        room in proptest::collection::vec(1i64..3, 1..4),
        requests in proptest::collection::vec((0usize..8, 0u32..6, 0u32..12, 0u8..3), 1..40),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
        let (queue, ranks) = (queue(), Ranks::new(&room));
        let rules = QueueRules { priority_seconds: 1e-4, ..rules(100) };
        runtime.block_on(async {
            let mut tasks = Vec::new();
            for (wanted, holds, leaves, priority) in requests {
                let (queue, ranks) = (Arc::clone(&queue), Arc::clone(&ranks));
                let wanted = Some(wanted).filter(|wanted| *wanted < ranks.0.len());
                let work = async move {
                    let held = queue.enter(&rules, priority, || ranks.take(&queue, wanted)).await;
                    assert!(held.is_ok(), "{:?}", held.err());
                    for _ in 0..holds {
                        tokio::task::yield_now().await;
                    }
                };
                tasks.push(tokio::spawn(async move {
                    // A third of them leave early.
                    let leave = async {
                        for _ in 0..leaves {
                            tokio::task::yield_now().await;
                        }
                        if leaves >= 4 {
                            std::future::pending::<()>().await;
                        }
                    };
                    tokio::select! {
                        () = work => {}
                        () = leave => {}
                    }
                }));
            }
            for task in tasks {
                task.await.unwrap();
            }
        });
        prop_assert!(queue.is_at_rest());
        let left: Vec<i64> = ranks.0.iter().map(|rank| rank.load(Ordering::SeqCst)).collect();
        prop_assert_eq!(left, room);
    }
}
